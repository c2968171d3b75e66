"""Judges one output: by few lanes, and a failure again by many fresh ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_result import OutputLanes
from pytest_fusion.oracle.rounding import GRIDS, D
from pytest_fusion.oracle.tolerance.codes import judge_codes, offending_codes
from pytest_fusion.oracle.tolerance.fence import fenced
from pytest_fusion.oracle.tolerance.floats import excess_floats, judge_floats
from pytest_fusion.oracle.tolerance.output_verdict import ValuesVerdict, index_of
from pytest_fusion.spec.promises import Tolerance


def judge_output(
    candidate: Tensor,
    few: OutputLanes,
    more: Callable[[], OutputLanes],
    *,
    fine: Callable[[], OutputLanes] | None = None,
    wide: Callable[[], OutputLanes] | None = None,
    laid: Callable[[], OutputLanes | None] | None = None,
    eager: Callable[[], Tensor | None] = lambda: None,
    size: float | None = None,
) -> ValuesVerdict:
    """The verdict on ``candidate`` by the lanes of the reference as written (kind ``E``).

    ``few`` are the lanes at hand (6 are enough). If they fail the candidate, fresh ones from ``more()`` (24; 64 for
    fewer than 16 elements) must fail it too. ``fine()`` returns lanes of kind ``F``; when it is given, a pass is
    graded: ``A`` when float32 arithmetic with one rounding explains the result, else ``B``. ``wide()`` returns as many
    of kind ``F`` as ``more()``; where the reference computes in 16 bits, they must fail it as well. ``laid()`` returns
    as many of the reference on inputs in the case's own layout, if there are any. They must fail it too: torch computes
    some functions differently by layout. ``eager()`` returns what the reference comes to op by op in 16 bits, and
    ``size`` is that of a gradient (`fence`).
    """
    by = few
    verdict = _judge(candidate, few)
    if not verdict.ok and verdict.statistic != "shape":
        by = more()
        verdict = _judge(candidate, by)
    if not verdict.ok and wide is not None and candidate.dtype in GRIDS and verdict.statistic != "shape":
        # Numbers that 16 bits hold exactly round to themselves, and their cancellation is then 0 in every lane. For 1 -
        # sigmoid(40) in bfloat16 a float32 kernel has 4e-18, and 1e-8 for two gradients of a hinge.
        strict = _judge(candidate, wide(), inclusive=False)
        if strict.ok:
            return replace(strict, grade="A")
    if not verdict.ok and laid is not None and verdict.statistic != "shape":
        there = laid()
        as_laid = verdict if there is None else _judge(candidate, there)
        if as_laid.ok:
            return replace(as_laid, grade="B" if fine is not None else None)
    if not verdict.ok:
        verdict = replace(verdict, by=by)
        return fenced(verdict, candidate, by, eager, size) if candidate.dtype in GRIDS else verdict
    if fine is None:
        return verdict
    strict = _judge(candidate, fine(), inclusive=False)
    return replace(verdict, grade="A" if strict.ok else "B")


@torch.no_grad()
def _judge(candidate: Tensor, lanes: OutputLanes, *, inclusive: bool = True) -> ValuesVerdict:
    native = lanes.native
    if candidate.shape != native.shape or candidate.dtype != native.dtype:
        return mismatched_shape(candidate, native)
    if not native.numel():
        return ValuesVerdict(True, None, "exact", 0.0, reason="no elements")
    if native.dtype.is_complex:
        # Lanes do not follow complex operations; this is torch's own comparison of float32 results.
        size = 64 * torch.finfo(native.dtype).eps
        return judge_plain(
            torch.view_as_real(candidate.resolve_conj()),
            torch.view_as_real(native.resolve_conj()),
            size,
            size * float(native.abs().nan_to_num(0.0, 0.0, 0.0).max()),
        )
    if native.dtype in GRIDS:
        return judge_floats(candidate, lanes, inclusive=inclusive)
    return judge_codes(candidate, lanes)


@torch.no_grad()
def excess(candidate: Tensor, lanes: OutputLanes) -> Tensor:
    """float64, of the candidate's shape: error over the allowed one; infinite for a wrong NaN, code or shape."""
    if candidate.shape != lanes.native.shape:
        return torch.full(candidate.shape, math.inf, dtype=D, device=candidate.device)
    if not candidate.numel():
        return torch.zeros(candidate.shape, dtype=D, device=candidate.device)
    if lanes.native.dtype in GRIDS:
        return excess_floats(candidate, lanes)
    if lanes.native.dtype.is_complex:
        return excess_plain(candidate, lanes.native, 1e-5, 1e-8)
    return torch.where(offending_codes(candidate, lanes), math.inf, 0.0).to(D)


def excess_by(candidate: Tensor, right: OutputLanes | Tensor, tolerance: str | Tolerance) -> Tensor:
    """As :func:`excess`, or as :func:`excess_plain` where ``right`` is a tensor and ``tolerance`` a fixed one."""
    if isinstance(right, OutputLanes):
        return excess(candidate.detach(), right)
    assert isinstance(tolerance, Tolerance)
    return excess_plain(candidate, right, tolerance.rtol, tolerance.atol)


def judge_plain(candidate: Tensor, native: Tensor, rtol: float, atol: float) -> ValuesVerdict:
    """The verdict by ``|got - expected| <= atol + rtol * |expected|``; NaN and infinities must be at equal places."""
    total = native.numel()
    if candidate.shape != native.shape:
        return mismatched_shape(candidate, native)
    if not total:
        return ValuesVerdict(True, None, "max", 0.0, reason="no elements")
    share = excess_plain(candidate, native, rtol, atol).reshape(-1)
    worst, wrong = int(share.argmax()), int((share > 1).sum())
    got, want = candidate.detach().to(D).reshape(-1), native.detach().to(D).reshape(-1)
    astray = ~(torch.isfinite(got) & torch.isfinite(want)) & (share > 0)
    name = "nonfinite" if bool(astray.any()) else "max"
    index, value, expected = index_of(worst, native.shape), float(got[worst]), float(want[worst])
    allowed = atol + rtol * abs(expected) if math.isfinite(value) and math.isfinite(expected) else 0.0
    reason = "within the given tolerance"
    if wrong:
        reason = (
            f"{wrong} of {total} elements are beyond rtol={rtol:g}, atol={atol:g}; worst at {list(index)}: "
            f"got {value:.9g}, expected {expected:.9g}"
        )
    found = ValuesVerdict(not wrong, "D" if wrong else None, name, float(share[worst]), index, value, expected, allowed)
    return replace(found, mismatched=wrong, total=total, reason=reason)


@torch.no_grad()
def excess_plain(candidate: Tensor, native: Tensor, rtol: float, atol: float) -> Tensor:
    """float64, of the candidate's shape: error over ``atol + rtol * |expected|``; infinite for a wrong NaN or inf."""
    if candidate.shape != native.shape:
        return torch.full(candidate.shape, math.inf, dtype=D, device=candidate.device)
    wide = torch.complex128 if native.dtype.is_complex else D
    got, want = candidate.detach().to(wide), native.detach().to(wide)
    finite = torch.isfinite(got) & torch.isfinite(want)
    same = (got == want) | (torch.isnan(got) & torch.isnan(want))
    share = (got - want).abs() / (atol + rtol * want.abs())
    return torch.where(same, 0.0, torch.where(finite, share, math.inf))


def mismatched_shape(candidate: Tensor, native: Tensor) -> ValuesVerdict:
    """The failure of a candidate whose shape or dtype differs."""
    reason = (
        f"got {tuple(candidate.shape)} {candidate.dtype}, the reference returns {tuple(native.shape)} {native.dtype}"
    )
    count = native.numel()
    return ValuesVerdict(False, "D", "shape", math.inf, mismatched=count, total=count, reason=reason)
