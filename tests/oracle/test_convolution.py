"""Convolutions: what lies in the padding may be multiplied by a weight that is no number, or left out."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracle.tolerance.judging import judged


def _inputs(low: torch.dtype, odd: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(2, 3, 9, generator=generator).to(low), torch.randn(5, 3, 3, generator=generator).to(low)
    w[1, 2, 0] = odd
    return x, w


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("low", [torch.float16, torch.float32])
def test_what_lies_past_the_edge_may_be_left_out(low: torch.dtype, odd: float) -> None:
    """A first tap that is no number reaches the first element by the zero before it, or does not; it is not lost."""
    x, w = _inputs(low, odd)

    def reference() -> Tensor:
        return F.conv1d(x, w, padding=1)

    within = torch.ones(9, dtype=torch.bool)
    within[0] = False
    left_out = F.conv1d(x.double(), torch.where(torch.isfinite(w), w, 0).double(), padding=1)
    added = F.conv1d(F.pad(x, (1, 1)).double(), w.double())
    left_out[:, 1] = torch.where(within, added[:, 1], left_out[:, 1])
    assert bool(torch.isnan(added[:, 1, 0]).all())
    assert bool(torch.isfinite(left_out[:, 1, 0]).all())
    assert judged(left_out.to(low), reference).ok
    assert judged(added.to(low), reference).ok
    lost = torch.where(torch.isfinite(added), added, 0.0)
    assert not judged(lost.to(low), reference).ok
    wrong = left_out.clone()
    wrong[:, 1, 0] += 1
    assert not judged(wrong.to(low), reference).ok


def test_several_infinite_taps_count_only_where_they_lie_within() -> None:
    """All nine taps of a 3 x 3 weight infinite, beside one element: the middle one makes it infinite, zeros do not."""
    x, w = torch.full((1, 1, 1, 1), 2.0).half(), torch.full((1, 1, 3, 3), math.inf).half()
    for got, ok in ((math.inf, True), (math.nan, True), (-math.inf, False), (2.0, False)):
        assert judged(torch.full((1, 1, 1, 1), got).half(), lambda: F.conv2d(x, w, padding=1)).ok is ok


def test_without_padding_nothing_is_left_out() -> None:
    """Every element of a convolution without padding that a weight reaches which is NaN is NaN."""
    x, w = _inputs(torch.float16, math.nan)
    right = F.conv1d(x.float(), w.float()).half()
    assert judged(right, lambda: F.conv1d(x, w)).ok
    right[:, 1, 0] = 0.0
    assert not judged(right, lambda: F.conv1d(x, w)).ok
