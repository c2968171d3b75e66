"""Specs and plans for the tests of cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_fusion.case.plan import Limits, Plan, make_plan
from pytest_fusion.spec.fusion_spec import FusionSpec


@pytest.fixture
def make_spec() -> Callable[..., FusionSpec]:
    """A spec of these inputs whose kernel takes anything."""

    def make(inputs: dict[str, Any], **keywords: Any) -> FusionSpec:
        return FusionSpec(fused=lambda **given: given, reference=lambda **given: given, inputs=inputs, **keywords)

    return make


@pytest.fixture
def plan_of(make_spec: Callable[..., FusionSpec]) -> Callable[..., Plan]:
    """The plan of a spec of these inputs, within limits of 4096 elements."""

    def make(inputs: dict[str, Any], *, pools: Any = None, blocks: tuple[int, ...] = (), **keywords: Any) -> Plan:
        limits = Limits(elements=4096, work=1 << 20)
        return make_plan(make_spec(inputs, **keywords), blocks=blocks, pools=pools, limits=limits)

    return make
