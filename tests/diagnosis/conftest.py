"""Plans to shrink in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_fusion.case.plan import Limits, Plan, make_plan
from pytest_fusion.spec.fusion_spec import FusionSpec


@pytest.fixture
def plan_of() -> Callable[..., Plan]:
    """The plan of a spec of these inputs whose kernel takes anything."""

    def make(inputs: dict[str, Any], *, pools: Any = None, **keywords: Any) -> Plan:
        spec = FusionSpec(fused=lambda **given: given, reference=lambda **given: given, inputs=inputs, **keywords)
        return make_plan(spec, pools=pools, limits=Limits())

    return make
