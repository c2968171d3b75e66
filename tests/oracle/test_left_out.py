"""Products: what is multiplied by 0 may be NaN or infinite, and then counts or is left out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.oracle.tolerance.judging import judged


def _scores(odd: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    scores, v = torch.randn(6, 6, generator=generator), torch.randn(6, 4, generator=generator)
    v[3, 1] = odd
    return scores, v


def _attention(scores: Tensor, v: Tensor) -> Tensor:
    """Causal: query i meets the keys up to i."""
    ahead = torch.ones(6, 6, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(ahead, -math.inf), -1) @ v


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float32])
def test_keys_behind_a_mask_may_be_left_out(odd: float, low: torch.dtype) -> None:
    """A kernel that ends its loop at the last key it needs never meets what is odd past it; from there on it does."""
    scores, v = (t.to(low) for t in _scores(odd))

    def reference() -> Tensor:
        return _attention(scores, v)

    added = _attention(scores.double(), v.double())
    left_out = torch.cat([_attention(scores.double(), torch.nan_to_num(v.double(), 0.0, 0.0))[:3], added[3:]])
    assert bool(added[:3, 1].isnan().all())
    assert bool(torch.isfinite(left_out[:3]).all())
    assert judged(left_out.to(low), reference).ok
    assert judged(added.to(low), reference).ok
    lost = left_out.clone()
    lost[3:, 1] = 0.5
    assert not judged(lost.to(low), reference).ok, "a key that counts"
    wrong = left_out.clone()
    wrong[1, 1] += 1
    assert not judged(wrong.to(low), reference).ok


def test_rows_of_other_groups_may_be_left_out() -> None:
    """A sum by groups, written as a product with rows of zeros and ones, need not add what is odd elsewhere."""
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
    x[0, 0] = math.nan
    x[4, 2] = -math.inf
    groups = torch.tensor([0, 0, 1, 1, 1])

    def reference() -> Tensor:
        return (groups == torch.arange(2)[:, None]).float() @ x

    right = torch.stack([x[:2].sum(0), x[2:].sum(0)])
    assert judged(right, reference).ok
    for at, value in (((0, 0), 0.0), ((1, 2), math.inf), ((1, 0), -7.0)):
        wrong = right.clone()
        wrong[at] = value
        assert not judged(wrong, reference).ok, at


def test_factors_that_count_are_not_left_out() -> None:
    """Infinity times a positive number is infinity, by either factor; both infinities are NaN."""
    x = torch.tensor([[1.0, 0.0, 2.0], [-1.0, math.inf, 0.0]])
    w = torch.tensor([[math.inf, 1.0], [1.0, 0.0], [0.0, math.inf]])
    right = torch.tensor([[math.inf, math.inf], [math.nan, -1.0]])
    assert judged(right, lambda: x @ w).ok
    for at in ((0, 0), (0, 1), (1, 0)):
        for value in (-math.inf, 0.0):
            wrong = right.clone()
            wrong[at] = value
            assert not judged(wrong, lambda: x @ w).ok, (at, value)
