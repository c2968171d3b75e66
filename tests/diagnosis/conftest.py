"""Plans to shrink in, and laboratories to diagnose in; the kernels of these tests are plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.plan import Limits, Plan, build, make_plan
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.context import Context
from pytest_fusion.diagnosis.experiments import Lab
from pytest_fusion.spec.fusion_spec import FusionSpec


@pytest.fixture
def plan_of() -> Callable[..., Plan]:
    """The plan of a spec of these inputs whose kernel takes anything."""

    def make(inputs: dict[str, Any], *, pools: Any = None, **keywords: Any) -> Plan:
        spec = FusionSpec(fused=lambda **given: given, reference=lambda **given: given, inputs=inputs, **keywords)
        return make_plan(spec, pools=pools, limits=Limits())

    return make


@pytest.fixture
def lab_of() -> Callable[..., Lab]:
    """The laboratory of a kernel's failure on the case of these choices, whatever the shrinker would make of it."""

    def make(
        fused: Callable[..., Any],
        reference: Callable[..., Any],
        inputs: dict[str, Any],
        choice: dict[str, Any],
        *,
        blocks: tuple[int, ...] = (),
        change: Callable[[Case], Case] = lambda case: case,
        again: bool = False,
        max_runs: int = 240,
        pools: Any = None,
        **keywords: Any,
    ) -> Lab:
        spec = FusionSpec(fused=fused, reference=reference, inputs=inputs, **keywords)
        plan = make_plan(spec, pools=pools, limits=Limits())
        context = Context(spec, torch.device("cpu"))
        case = change(build(plan, choice, 0))
        result = judge_case(context, case, again=again)
        assert result.failure is not None, "the case that is diagnosed must fail"
        return Lab(context, plan, result.case, result.failure, blocks=blocks, max_runs=max_runs, max_seconds=1e9)

    return make
