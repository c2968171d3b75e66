"""The explicit tolerance: ``|got - expected| <= atol + rtol * |expected|``."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from pytest_fusion.oracle.rounding import D
from pytest_fusion.oracle.tolerance.output_verdict import ValuesVerdict, index_of


def judge_plain(candidate: Tensor, native: Tensor, rtol: float, atol: float) -> ValuesVerdict:
    """The verdict by fixed tolerances; NaN and infinities must be at the same places."""
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
