"""Check `values`: each output against the reference's lanes, or against a fixed tolerance where one was insisted on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace

import torch

from pytest_fusion.checks.evidence import Deviation
from pytest_fusion.checks.verdict import Verdict, failed, passed
from pytest_fusion.oracle import OutputLanes
from pytest_fusion.oracle.tolerance import ValuesVerdict, judge_output, judge_plain
from pytest_fusion.spec.promises import Tolerance

# Of the largest element: sums of float64 in another order are closer, and one in float32 is not.
_ALIKE = 2.0**-40


def judge_one(
    candidate: torch.Tensor,
    native: torch.Tensor,
    few: OutputLanes | None,
    more: Callable[[], OutputLanes] | None,
    tolerance: str | Tolerance,
    fine: Callable[[], OutputLanes] | None = None,
    wide: Callable[[], OutputLanes] | None = None,
    laid: Callable[[], OutputLanes | None] | None = None,
) -> ValuesVerdict:
    """Judge one output by the policy in force; ``fine`` gives the lanes that a grade needs, ``wide`` those of float32
    where the reference computes in 16 bits, ``laid`` those of the reference on the inputs as they lie."""
    if isinstance(tolerance, Tolerance):
        return judge_plain(candidate, native, tolerance.rtol, tolerance.atol)
    assert few is not None
    assert more is not None
    return judge_output(candidate, few, more, fine=fine, wide=wide, laid=laid)


def meant_alike(lanes: OutputLanes, laid: OutputLanes) -> OutputLanes | None:
    """``laid`` where the reference means the same by inputs in other layouts, and only its rounding differs."""
    one, other = lanes.oracle, laid.oracle
    if one.shape != other.shape or not bool((one.isfinite() == other.isfinite()).all()):
        return None
    apart, size = (t.nan_to_num(0.0, 0.0, 0.0).abs() for t in (one - other, one))
    return laid if not one.numel() or float(apart.max()) <= _ALIKE * float(size.max()) else None


def worst_of(verdicts: Mapping[str, ValuesVerdict]) -> str | None:
    """The output that fails by the largest ratio, or has the largest one where none fails; ``None`` of no outputs."""
    return max(verdicts, key=lambda name: (not verdicts[name].ok, verdicts[name].ratio), default=None)


def as_verdict(verdicts: Mapping[str, ValuesVerdict]) -> Verdict:
    """The worst output's conclusion; evidence has the worst ratio of error to allowed, and the grade."""
    worst_name = worst_of(verdicts)
    if worst_name is None:
        return passed("values")
    worst = verdicts[worst_name]
    if worst.ok:
        grades = [v.grade for v in verdicts.values() if v.grade is not None]
        return replace(passed("values", replace(deviation(worst), grade=max(grades, default=None))), output=worst_name)
    kind = "nonfinite" if worst.statistic == "nonfinite" else "finite"
    return failed(
        "values",
        f"{worst_name}: {worst.reason}",
        identity=f"values:{worst_name}:{kind}",
        statistical=worst.statistical,
        output=worst_name,
        evidence=deviation(worst),
    )


def deviation(verdict: ValuesVerdict) -> Deviation:
    """The evidence of an output's comparison."""
    seen = {each.name: getattr(verdict, each.name) for each in fields(Deviation)}
    return Deviation(**{**seen, "index": None if verdict.index is None else list(verdict.index)})
