"""Results that no rounding has touched: of few elements too a kernel must give these numbers and no neighbours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracle.tolerance.judging import judged

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def numbers(dtype: torch.dtype, count: int = 12) -> Tensor:
    return (3 * torch.randn(count, generator=torch.Generator().manual_seed(3))).to(dtype)


def next_up(value: Tensor, count: int) -> Tensor:
    """The first elements one unit in the last place further from 0."""
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    bits = value.clone().view(word)
    bits.view(-1)[:count] += 1
    return bits.view(value.dtype)


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "the largest": lambda x: x.amax(),
    "in order": lambda x: x.sort().values,
    "gathered": lambda x: x[torch.tensor([4, 4, 0])],
    "clamped": lambda x: x.clamp(-2.0, 2.0),
    "negated": lambda x: -x,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MOVES)
def test_a_neighbour_is_another_number(name: str, dtype: torch.dtype) -> None:
    """One unit in the last place, of one element or of all, passed where they were fewer than 16."""
    x = numbers(dtype)
    right = MOVES[name](x)
    for count in {0, 1, right.numel()}:
        verdict = judged(next_up(right, count), lambda: MOVES[name](x))
        assert verdict.ok is (count == 0), verdict.reason
    assert f"{right.numel()} of {right.numel()} elements differ from the reference, which is exact" in verdict.reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_computed_may_be_a_neighbour(dtype: torch.dtype) -> None:
    """Rounded once, and beside what is not: the steep side of an activation may come out of its other formula."""
    x = numbers(dtype)
    for reference in (lambda: x * 1.1, lambda: F.elu(x), lambda: torch.where(x > 0, x, torch.exp(x) - 1)):
        right = reference()
        assert judged(next_up(right, 1), reference).ok
        assert not judged(next_up(right, 1) * 1.1, reference).ok


def test_a_quotient_that_happens_to_be_exact_may_be_a_neighbour() -> None:
    """One number over the sum of its row is 1, and times the reciprocal of that it may be 1 - 2^-24."""
    x = torch.tensor([[3.3]])
    assert judged(torch.tensor([[1 - 2.0**-24]]), lambda: x / x.abs().sum(-1, keepdim=True)).ok
    assert not judged(torch.tensor([[1 - 2.0**-20]]), lambda: x / x.abs().sum(-1, keepdim=True)).ok


def test_subnormal_numbers_may_be_flushed() -> None:
    """As code compiled with flush-to-zero reads them; zeros are held to what they were before."""
    x = torch.tensor([1e-40, -2e-41, 0.0])
    assert judged(torch.zeros(3), lambda: -x).ok
    assert not judged(torch.tensor([0.0, 0.0, 1e-30]), lambda: -x).ok
