"""Judging a spec in this process, without touching Triton: the kernels of these tests are plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.case.choosing import search
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.context import CaseResult, Context
from pytest_fusion.engine import minimum
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.modes import Judge
from pytest_fusion.engine.profiles import PROFILES
from pytest_fusion.engine.request import Request
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run import pristine
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor

Examine = Callable[..., TestRecord]
JudgeOne = Callable[..., CaseResult]


def _spec(fused: Callable[..., Any], reference: Callable[..., Any], inputs: Any, keywords: Any) -> FusionSpec:
    given = {"x": tensor("rows hidden")} if inputs is None else inputs
    return FusionSpec(fused=fused, reference=reference, inputs=given, **{"dtypes": "float32", **keywords})


@pytest.fixture
def examine(tmp_path: Path) -> Examine:
    """All checks on up to ``cases`` cases, by default of one float32 matrix ``x``, until the first failure; ``seconds``
    is the budget."""

    def judge(
        fused: Callable[..., Any],
        reference: Callable[..., Any],
        inputs: Any = None,
        *,
        cases: int = 12,
        seed: int = 0,
        seconds: float = math.inf,
        **keywords: Any,
    ) -> TestRecord:
        def outer() -> None: ...

        search.adopt(outer, outer)
        profile = replace(PROFILES["dev"], budget_s=seconds)
        request = Request("test", profile=profile, isolate="off", root=tmp_path, seed=seed, max_cases=cases, first=True)
        return Judge().run(Job(_spec(fused, reference, inputs, keywords), request, outer, {}))

    return judge


@pytest.fixture
def judge_one() -> JudgeOne:
    """One case of a float32 matrix ``x``, 5 x 7 unless ``case`` says otherwise."""

    def judge(
        fused: Callable[..., Any],
        reference: Callable[..., Any],
        inputs: Any = None,
        *,
        case: Case | None = None,
        again: bool = False,
        **keywords: Any,
    ) -> CaseResult:
        spec = _spec(fused, reference, inputs, keywords)
        plain = Case({"rows": 5, "hidden": 7}, "float32", {"x": TensorCase("float32")}, seed=1)
        return judge_case(Context(spec, torch.device("cpu")), case or plain, again=again)

    return judge


@pytest.fixture
def unexplained(monkeypatch: pytest.MonkeyPatch) -> None:
    """No experiments for causes, which take up to 1.5 s, in tests that do not look at them."""
    monkeypatch.setattr(minimum, "diagnose", lambda lab: None)


@pytest.fixture(autouse=True)
def nothing_replaced() -> Iterator[None]:
    """What a test's kernel replaced is no finding of another test."""
    pristine.take()
    yield
    pristine.take()
