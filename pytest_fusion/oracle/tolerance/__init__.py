"""Automatic tolerance: the reference's own rounding decides how far off a fused kernel may be."""

from __future__ import annotations

from pytest_fusion.oracle.tolerance.output_judge import excess, excess_by, judge_output, judge_plain
from pytest_fusion.oracle.tolerance.output_verdict import Grade, ValuesVerdict

__all__ = ["Grade", "ValuesVerdict", "excess", "excess_by", "judge_output", "judge_plain"]
