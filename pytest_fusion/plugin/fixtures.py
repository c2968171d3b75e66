"""The fixtures `fusion`, `fusion_bench` and `fusion_device`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_fusion.plugin import keys
from pytest_fusion.plugin.options import file_named_by

if TYPE_CHECKING:
    from pytest_fusion.plugin.measuring import FusionBench
    from pytest_fusion.report.record import TestRecord


@pytest.fixture
def fusion() -> Callable[..., TestRecord]:
    """Judge one concrete call inside a test: ``fusion(fused, reference, *args, **kwargs)``."""
    from pytest_fusion.plugin.check import check_equivalent

    return check_equivalent


@pytest.fixture
def fusion_bench(request: pytest.FixtureRequest) -> FusionBench:
    """Call ``fused`` and, with --fusion-bench, measure it: ``fusion_bench(fused, reference, *args, **kwargs)``."""
    from pytest_fusion.plugin.measuring import FusionBench

    measured = request.config.stash[keys.options].bench
    return FusionBench(measured=measured, profiled=file_named_by("PYTEST_FUSION_PROFILED"))


@pytest.fixture(scope="session")
def fusion_device(request: pytest.FixtureRequest) -> str:
    """The device that kernels are judged on: ``"cpu"`` or ``"cuda:N"``."""
    return request.config.stash[keys.device]
