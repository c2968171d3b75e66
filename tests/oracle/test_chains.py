"""What a reference adds up one by one, or by an operation without a rule, a kernel may add up in another order."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pytest_fusion.oracle import run_lanes
from tests.oracle.judging import judged
from tests.sweeps import sweep

SEEDS = sweep("seed", range(8), fast=2)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def added(x: Tensor, order: Iterable[int], *, in_place: bool = False) -> Tensor:
    total = torch.zeros(x.shape[0], x.shape[1] - 3)
    for tap in order:
        term = x[:, tap : tap + total.shape[1]]
        if in_place:
            total += term
        else:
            total = total + term
    return total


@SEEDS
@pytest.mark.parametrize("in_place", [False, True])
def test_taps_may_be_added_in_any_order(seed: int, in_place: bool) -> None:
    """A loop over taps run backwards rounds otherwise, most where partial sums cancel; a wrong tap is no rounding."""
    x = normal(seed, 20, 803)

    def reference() -> Tensor:
        return added(x, range(4), in_place=in_place)

    assert judged(added(x, (3, 2, 1, 0)), reference, seed)
    assert judged(x.unfold(1, 4, 1).sum(-1), reference, seed)
    assert not judged(added(x, (3, 2, 1, 0)) + 1e-5 * x[:, :800], reference, seed)


@SEEDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_numbers_may_be_added_in_any_order(seed: int, dtype: torch.dtype) -> None:
    """Both orders, and what differences make of them; a number two hundredths too large is an error."""
    x, y, z = (normal(seed + 10 * k, 4000).to(dtype).float() for k in range(3))
    assert judged((x + (y + z)).to(dtype), lambda: (x + y + z).to(dtype), seed)
    assert judged((x - (y - z)).to(dtype), lambda: (x - y + z).to(dtype), seed)
    assert not judged((x + (y + z * 1.02)).to(dtype), lambda: (x + y + z).to(dtype), seed)


def test_whole_numbers_are_added_exactly() -> None:
    """No order rounds them: what is compared afterwards is known."""
    x = torch.randint(-50, 50, (3, 4000), generator=torch.Generator().manual_seed(0)).float()

    def reference() -> Tensor:
        return x[0] + x[1] + x[2] > 7

    few = run_lanes(lambda: [x[0] + x[1] + x[2]], seed=0).outputs[0]
    assert bool((few.lanes == few.oracle).all())
    assert judged(reference(), reference, 0)
    assert not judged(x[0] + x[1] + x[2] >= 7, reference, 0)


@SEEDS
@pytest.mark.parametrize("masked", [False, True])
def test_sums_of_segments_may_be_added_in_any_order(seed: int, masked: bool) -> None:
    """A scan over segments adds in a tree what a loop adds one by one, and starts again where a segment begins."""
    x, begins = normal(seed, 64, 30), normal(seed + 1, 64, 30) > 1.2

    def reference() -> Tensor:
        total, sums = torch.zeros(64), []
        for column in range(30):
            kept = total * (~begins[:, column]).float() if masked else torch.where(begins[:, column], 0.0, total)
            total = kept + x[:, column]
            sums.append(total)
        return torch.stack(sums, 1)

    segment = begins.cumsum(1)
    same = (segment[:, :, None] == segment[:, None, :]).tril()
    halves = torch.where(same, x[:, None, :], 0.0).reshape(64, 30, 2, 15).sum(-1)
    other = halves[..., 1] + halves[..., 0]
    assert judged(other, reference, seed)
    assert not judged(other + torch.where(begins.roll(1, 1), 1e-4, 0.0), reference, seed)


@SEEDS
def test_operations_without_a_rule_may_add_in_any_order(seed: int) -> None:
    """Bags and pools err by the size of what they add, however little it comes to; a hundredth of a weight is more."""
    weight, rows = normal(seed, 40, 33), torch.randint(0, 40, (50, 24), generator=torch.Generator().manual_seed(seed))

    def bags() -> Tensor:
        return F.embedding_bag(rows, weight, mode="sum")

    assert judged(weight[rows].flip(1).cumsum(1)[:, -1], bags, seed)
    assert not judged(weight[rows].sum(1) + 1e-3, bags, seed)
    x = normal(seed, 2, 3, 24, 24)

    def pooled() -> Tensor:
        return F.avg_pool2d(x, 5, 1)

    by_rows = x.unfold(2, 5, 1).flip(-1).cumsum(-1)[..., -1].unfold(3, 5, 1).sum(-1) * (1 / 25)
    assert judged(by_rows, pooled, seed)
    assert not judged(by_rows * (25 / 24.9), pooled, seed)


@SEEDS
def test_indices_of_an_operation_without_a_rule_are_not_free(seed: int) -> None:
    """Where operands are shaken, what is chosen among them is not."""
    weight = normal(seed, 40, 9)
    rows = torch.randint(0, 40, (50, 6), generator=torch.Generator().manual_seed(seed))

    def chosen() -> Tensor:
        return torch.ops.aten._embedding_bag(weight, rows.reshape(-1), torch.arange(0, 300, 6), False, 2)[3]

    other = chosen().clone()
    other[3, 4] += 1
    assert judged(chosen(), chosen, seed)
    assert not judged(other, chosen, seed)


@SEEDS
def test_moments_may_be_merged(seed: int) -> None:
    """Chan's rule for halves rounds the difference of their means at the size of the means; n for n - 1 is an error."""
    x = normal(seed, 400, 6) + 24
    one, other = x[:, :3], x[:, 3:]
    apart = one.mean(1) - other.mean(1)
    squares = sum((half - half.mean(1, keepdim=True)).square().sum(1) for half in (one, other)) + apart.square() * 1.5

    def reference() -> Tensor:
        return x.var(1, correction=0)

    assert judged(squares / 6, reference, seed)
    assert not judged(squares / 5, reference, seed)


@SEEDS
@pytest.mark.parametrize("size", [(8, 9), (64, 128)])
def test_a_sum_may_be_taken_out_of_a_product(seed: int, size: tuple[int, int]) -> None:
    """``x @ (q * s + m)`` is ``s * (x @ q) + m * sum(x)``; with the last column left out of the sum it is not."""
    rows, columns = size
    x, scale = normal(seed, rows, 32) + 24, normal(seed + 1, columns, 1).abs() * 0.05 + 0.01
    least = -7.5 * scale + 0.01 * normal(seed + 2, columns, 1)
    codes = torch.randint(0, 16, (columns, 32), generator=torch.Generator().manual_seed(seed)).float()

    def reference() -> Tensor:
        return x @ (codes * scale + least).T

    def factored(x: Tensor, summed: Tensor) -> Tensor:
        return (x @ codes.T) * scale.T + summed.sum(1, keepdim=True) * least.T

    assert judged(factored(x, x), reference, seed)
    assert not judged(factored(x, x[:, :-1]), reference, seed)
