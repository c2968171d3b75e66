"""What tests of checks share: a reference, and what one check concluded."""

from __future__ import annotations

import torch

from pytest_fusion.checks.context import CaseResult
from pytest_fusion.checks.verdict import Verdict


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def concluded(result: CaseResult, check: str) -> Verdict:
    """The only verdict of ``check`` on a case."""
    (verdict,) = [verdict for verdict in result.verdicts if verdict.check == check]
    return verdict
