"""The fixtures `fusion`, `fusion_bench` and `fusion_device`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fusion import keys

if TYPE_CHECKING:
    from pytest_fusion.measuring import FusionBench
    from pytest_fusion.report.record import TestRecord


@pytest.fixture
def fusion() -> Callable[..., TestRecord]:
    """Judge one concrete call inside a test: ``fusion(fused, reference, *args, **kwargs)``."""

    def check(fused: Callable[..., Any], reference: Callable[..., Any], *args: Any, **kwargs: Any) -> TestRecord:
        __tracebackhide__ = True
        from pytest_fusion.check import check_equivalent

        return check_equivalent(fused, reference, *args, **kwargs)

    return check


@pytest.fixture
def fusion_bench(request: pytest.FixtureRequest) -> FusionBench:
    """Call ``fused`` and, with --fusion-bench, measure it: ``fusion_bench(fused, reference, *args, **kwargs)``."""
    from pytest_fusion.measuring import FusionBench

    profiled = os.environ.get("PYTEST_FUSION_PROFILED")
    return FusionBench(measured=request.config.stash[keys.options].bench, profiled=Path(profiled) if profiled else None)


@pytest.fixture(scope="session")
def fusion_device(request: pytest.FixtureRequest) -> str:
    """The device that kernels are judged on: ``"cpu"`` or ``"cuda:N"``."""
    return request.config.stash[keys.device]
