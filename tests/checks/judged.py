"""What tests of checks share: a reference, and what one check concluded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.checks.context import CaseResult
from pytest_fusion.checks.verdict import Verdict


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def of_x(function: Any) -> Callable[[torch.Tensor], Any]:
    """An ``autograd.Function`` of ``x``, by position: torch 2.11 takes no names in ``apply``."""

    def fused(x: torch.Tensor) -> Any:
        return function.apply(x)

    return fused


def plain_cases(count: int) -> list[Case]:
    """Cases of one small float32 matrix ``x``, which differ by their seeds."""
    sizes = {"rows": 3, "hidden": 4}
    return [Case(sizes, "float32", {"x": TensorCase("float32")}, seed=seed) for seed in range(count)]


def concluded(result: CaseResult, check: str) -> Verdict:
    """The only verdict of ``check`` on a case, but for hazards."""
    (verdict,) = [v for v in result.verdicts if v.check == check and v.status != "hazard"]
    return verdict


def hazards(result: CaseResult, code: str) -> list[Verdict]:
    """The hazards of this code on a case."""
    return [verdict for verdict in result.verdicts if verdict.code == code]
