"""Sums of the same terms: a kernel is as far off in each of them, and what adds them up does not average that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pytest_fusion.oracle.rounding import Noise
from tests.oracle.judging import judged

ROWS, TERMS, COPIES = 64, 500, 30


def one_after_another(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in float32, a term at a time, as a loop over ``k`` in one accumulator has it."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        total += a[:, k : k + 1] * b[k : k + 1]
    return total


def in_tf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The same of operands without the last 13 bits, as tensor cores take them."""
    a, b = ((x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32) for x in (a, b))
    return one_after_another(a, b)


def factors(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    column = torch.randn(TERMS, 1, generator=source) * 100
    return torch.randn(ROWS, TERMS, generator=source), column.expand(-1, COPIES), torch.ones(COPIES, 1)


def two_products(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], seed: int) -> torch.Tensor:
    x, down, up = factors(seed)
    return product(product(x, down), up)


@pytest.mark.parametrize("seed", range(8))
def test_a_product_with_equal_columns_may_be_added_up(seed: int) -> None:
    """Found by ``lora_linear`` with an expanded factor: its honest gradient was refused on a GPU."""
    assert judged(two_products(one_after_another, seed), lambda: two_products(torch.matmul, seed), seed)


@pytest.mark.parametrize("seed", range(3))
def test_coarser_products_are_refused_there_still(seed: int) -> None:
    """Equal columns excuse no operands of fewer bits."""
    assert not judged(two_products(in_tf32, seed), lambda: two_products(torch.matmul, seed), seed)


def test_what_differs_is_rounded_on_its_own() -> None:
    """Elements of one sum and one sum of squares get one number in each lane; where either differs, another."""
    total, squares = torch.tensor([[3.0, 3.0, 3.0, 5.0], [3.0, 4.0, -3.0, 5.0]], dtype=torch.float64), torch.ones(2, 4)
    squares[1, 3] = 2.0
    found = Noise(6, "E", 0).normal_of(total, squares)
    assert found.shape == (6, 2, 4)
    assert len({tuple(column.tolist()) for column in found.flatten(1).t()}) == 5
    assert found[:, 0, 0].equal(found[:, 0, 2])
    assert found[:, 0, 0].equal(found[:, 1, 0])
    assert len(set(found[:, 0, 0].tolist())) == 6


def test_numbers_for_sums_are_normal() -> None:
    """Numbers drawn from what is summed have mean 0 and deviation 1, and lanes are independent of it and each other."""
    source = torch.Generator().manual_seed(0)
    total = torch.randn(20_000, generator=source, dtype=torch.float64)
    found = Noise(4, "E", 0).normal_of(total, total.square())
    assert found.mean(1).abs().max() < 0.03
    assert (found.std(1) - 1).abs().max() < 0.03
    between = torch.corrcoef(torch.cat([found, total[None]]))
    assert (between - torch.eye(5)).abs().max() < 0.03
