"""Automatic tolerance: the reference's own rounding decides how far a fused kernel may be off."""

from __future__ import annotations

from pytest_fusion.verdict.tolerance.judge import excess, excess_by, judge_output
from pytest_fusion.verdict.tolerance.model import Grade, ValuesVerdict
from pytest_fusion.verdict.tolerance.plain import judge_plain

__all__ = ["Grade", "ValuesVerdict", "excess", "excess_by", "judge_output", "judge_plain"]
