"""The laboratory's own limits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from triton.runtime.jit import JITFunction

from pytest_fusion import tensor
from pytest_fusion.case.plan import Limits, build, make_plan
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.context import Context
from pytest_fusion.diagnosis.experiments import Lab
from pytest_fusion.spec.fusion_spec import FusionSpec


@pytest.mark.parametrize(("compiling", "runs"), [(True, 2), (False, 1)])
def test_compiling_variants_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch, compiling: bool, runs: int) -> None:
    """At 10 s a compilation, 8 s of experiments and 8 s of compiling are two runs; 10 s of running are one."""
    now = [0.0]

    def takes_long(*_: object) -> None:
        now[0] += 10

    monkeypatch.setattr(JITFunction, "_do_compile", takes_long)

    def fused(x: torch.Tensor) -> torch.Tensor:
        if compiling:
            JITFunction._do_compile(SimpleNamespace(fn=None))
        else:
            takes_long()
        return x * 3

    spec = FusionSpec(fused=fused, reference=lambda x: x * 2, inputs={"x": tensor("rows n")})
    plan = make_plan(spec, limits=Limits())
    context = Context(spec, torch.device("cpu"))
    cases = [build(plan, {"dim rows": size, "dim n": 3}, size) for size in range(1, 6)]
    result = judge_case(context, cases[0])
    assert result.failure is not None
    lab = Lab(context, plan, cases[0], result.failure, clock=lambda: now[0])
    assert [lab.attempt(case).wrong for case in cases] == [True] * runs + [False] * (5 - runs)
    assert lab.spent


def test_experiments_are_about_the_output_that_failed(lab_of: Any) -> None:
    """What the message names is looked at where it is wrong, though another output is further off in a variant."""

    def fused(x: torch.Tensor, s: float) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1e6 * s, x + 1

    inputs = {"x": tensor("rows n"), "s": st.sampled_from([0.0, 1.0])}
    lab = lab_of(
        fused,
        lambda x, s: (x * 1, x * 1),
        inputs,
        {"dim rows": 2, "dim n": 3},
        pools={"s": (0.0, 1.0)},
        dtypes="float32",
    )
    assert lab.verdict.output == "out[1]"
    variant = lab.base.with_(drawn={"s": 1.0})
    assert lab.attempt(variant).probe.result.evidence[0] == "out[0]"
    assert lab.wrong_of(lab.attempt(variant)).name == "out[1]"


def test_a_variant_that_shows_another_finding_is_no_evidence(lab_of: Any) -> None:
    """What hides a finding does not cure it; a variant of another output that is right is right."""

    def fused(x: torch.Tensor, s: float) -> torch.Tensor:
        return torch.full_like(x, torch.nan) if s else x + 1

    inputs = {"x": tensor("rows n"), "s": st.sampled_from([0.0, 1.0])}
    choice = {"dim rows": 2, "dim n": 3}
    lab = lab_of(fused, lambda x, s: x * 1, inputs, choice, pools={"s": (0.0, 1.0)}, dtypes="float32")
    variant = lab.base.with_(drawn={"s": 1.0})
    other = lab.attempt(variant)
    assert other.status == "otherwise"
    known = frozenset({other.probe.failure.identity})
    context = replace(lab.context, focus=replace(lab.context.focus, known=known))
    again = Lab(context, lab.plan, lab.base, lab.verdict)
    assert again.attempt(variant).status == "impossible"
    assert again.attempt(lab.base).wrong
