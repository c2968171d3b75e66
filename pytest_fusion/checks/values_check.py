"""Check `values`: each output against the reference's lanes, or a fixed tolerance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from pytest_fusion.checks.verdict import Deviation, Evidence, Verdict, failed, hazard, passed
from pytest_fusion.oracle import OutputLanes
from pytest_fusion.oracle.eager import run_eager
from pytest_fusion.oracle.reference import ReferenceFailed
from pytest_fusion.oracle.tolerance import ValuesVerdict, judge_output, judge_plain
from pytest_fusion.oracle.tolerance.output_judge import excess_by
from pytest_fusion.spec.promises import Tolerance

# Relative to the largest element: float64 sums in another order are closer, float32 sums are not.
_ALIKE = 2.0**-40


def judge_one(
    candidate: torch.Tensor,
    native: torch.Tensor,
    few: OutputLanes | None,
    more: Callable[[], OutputLanes] | None,
    tolerance: str | Tolerance,
    *,
    infinite: Callable[[], bool] = lambda: False,
    **further: Any,
) -> ValuesVerdict:
    """Judge one output by the policy in force; ``further`` is that of ``judge_output``. Elements that lost NaN or
    infinity are left out of the verdict, and named by it; so are those that made NaN of an infinity, where an input is
    ``infinite`` or the reference overflows (two experts' outputs in float16 are inf - inf, fused_moe of Liger)."""

    def judged(got: torch.Tensor) -> ValuesVerdict:
        if isinstance(tolerance, Tolerance):
            return judge_plain(got, native, tolerance.rtol, tolerance.atol)
        assert few is not None
        assert more is not None
        return judge_output(got, few, more, **further)

    verdict = judged(candidate)
    if verdict.ok or verdict.statistic == "shape":
        return verdict
    lost, exchanged = _lost(candidate, native)
    if bool(exchanged.any()):
        overflows = few.oracle.isfinite() if few is not None else torch.zeros_like(exchanged)
        lost |= exchanged if infinite() else exchanged & overflows
    if not bool(lost.any()):
        return verdict
    lost &= excess_by(candidate, verdict.by or native, tolerance).isinf()
    if not bool(lost.any()):
        return verdict
    first = tuple(lost.nonzero()[0].tolist())
    made = bool(exchanged[lost].all())
    what = "made NaN of the infinity" if made else "lost the NaN or infinity"
    swallowed = (
        f"{int(lost.sum())} of {lost.numel()} element(s) {what} that the reference has, the first "
        f"at {list(first)}: got {candidate[first].item():.9g}, the reference has {native[first].item():.9g}"
    )
    if made:
        swallowed += (
            "; inf - inf and 0 * inf come of another order, of a product by a mask, or of 16-bit results between"
        )
    elif not bool(native[lost].isnan().all()):
        swallowed += (
            "; if the reference overflows on its way there (exp of a large number), it is the reference that needs a "
            "stable form, or values= a range that it can take"
        )
    return replace(judged(torch.where(lost, native, candidate)), swallowed=swallowed)


def _lost(got: torch.Tensor, native: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements that are finite where the reference is NaN or infinite, or infinite where it is NaN; and those that are
    NaN where it is infinite."""
    got, native = (t.float() if t.element_size() == 1 else t for t in (got.detach(), native))
    lost = (got.isfinite() & ~native.isfinite()) | (~got.isnan() & native.isnan())
    return lost, got.isnan() & native.isinf()


def swallowed(check: str, verdicts: Mapping[str, ValuesVerdict]) -> list[Verdict]:
    """A hazard for each output that lost NaN or infinity and is right otherwise."""
    return [
        hazard(check, "nan-swallowed", f"{name}: {found.swallowed}", output=name, evidence=deviation(found))
        for name, found in verdicts.items()
        if found.grade != "D" and found.swallowed
    ]


def meant_alike(lanes: OutputLanes, laid: OutputLanes) -> OutputLanes | None:
    """``laid`` where the reference means the same for inputs in other layouts, up to rounding."""
    one, other = lanes.oracle, laid.oracle
    if one.shape != other.shape or not bool((one.isfinite() == other.isfinite()).all()):
        return None
    apart, size = (t.nan_to_num(0.0, 0.0, 0.0).abs() for t in (one - other, one))
    return laid if not one.numel() or float(apart.max()) <= _ALIKE * float(size.max()) else None


def eager_of(
    call: Callable[[], Sequence[torch.Tensor]], names: Callable[[], Sequence[str]], seed: int
) -> dict[str, torch.Tensor]:
    """The results of ``call`` in eager 16 bits, by ``names``; empty where it raises."""
    try:
        results = run_eager(call, seed=seed)
    except (ReferenceFailed, RuntimeError, TypeError):
        return {}
    return dict(zip(names(), results, strict=True))


def worst_of(verdicts: Mapping[str, ValuesVerdict]) -> str | None:
    """The output with the worst grade, then the largest ratio; ``None`` without outputs."""
    grades = {name: "" if verdict.ok else verdict.grade or "" for name, verdict in verdicts.items()}
    return max(verdicts, key=lambda name: (grades[name], verdicts[name].ratio), default=None)


def as_verdict(verdicts: Mapping[str, ValuesVerdict]) -> Verdict:
    """The worst output's conclusion; evidence has the worst ratio of error to allowed, and the grade."""
    name = worst_of(verdicts)
    if name is None:
        return passed("values")
    worst = verdicts[name]
    if worst.ok:
        grades = [v.grade for v in verdicts.values() if v.grade is not None]
        return replace(passed("values", replace(deviation(worst), grade=max(grades, default=None))), output=name)
    if worst.grade == "C":
        return less_accurate("values", f"{name}: {worst.reason}", worst, name)
    return failed(
        "values",
        f"{name}: {worst.reason}",
        identity=f"values:{name}:{kind_of(worst)}",
        statistical=worst.statistical,
        output=name,
        evidence=deviation(worst),
    )


def less_accurate(
    check: str, reason: str, worst: ValuesVerdict, output: str, evidence: Evidence | None = None
) -> Verdict:
    """The hazard of an output, or gradient, of grade ``C``."""
    evidence = evidence or deviation(worst)
    return hazard(check, "less-accurate", reason, statistical=worst.statistical, output=output, evidence=evidence)


def kind_of(verdict: ValuesVerdict) -> str:
    """What identities distinguish: NaN or infinity in the wrong place, or other numbers."""
    return "nonfinite" if verdict.statistic == "nonfinite" else "finite"


def deviation(verdict: ValuesVerdict) -> Deviation:
    """The evidence of an output's comparison."""
    seen = {each.name: getattr(verdict, each.name) for each in fields(Deviation)}
    return Deviation(**{**seen, "index": None if verdict.index is None else list(verdict.index)})
