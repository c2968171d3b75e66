"""A computed factor beside one of 16 bits: tensor cores take it in 16 bits too, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracle.tolerance.judging import judged
from tests.sweeps import sweep


@pytest.mark.parametrize("rows_at_once", [250, 8])
def test_a_weight_gradient_that_is_added_up_in_16_bits_is_wrong(rows_at_once: int) -> None:
    """A kernel may round the computed factor once, as tensor cores take it; 32 roundings of the sum are no such."""
    generator = torch.Generator().manual_seed(5)
    x, g = (torch.randn(250, n, generator=generator).bfloat16() for n in (8, 6))

    def reference() -> Tensor:
        return ((g.float() * 0.7).T @ x.float()).bfloat16()

    factor = (g.float() * 0.7).bfloat16()
    total = torch.zeros(6, 8, dtype=torch.bfloat16)
    for at in range(0, 250, rows_at_once):
        total += (factor[at : at + rows_at_once].float().T @ x[at : at + rows_at_once].float()).bfloat16()

    assert judged(total, reference).ok is (rows_at_once == 250)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_integers_are_no_sign_of_16_bits(dtype: torch.dtype) -> None:
    """8-bit weights fit bfloat16: beside activations of float32 that allows no rounding of these, beside bfloat16 it is
    what a kernel does that multiplies by them."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(64, 64, generator=generator).to(dtype)
    q = torch.randint(-127, 128, (64, 64), generator=generator, dtype=torch.int8)

    def reference(low: torch.dtype = torch.float32) -> Tensor:
        return F.silu(x.float()).to(low).float() @ q.float()

    assert judged(reference(torch.bfloat16), reference).ok is (dtype == torch.bfloat16)
    assert judged(reference(), reference).ok


def test_a_factor_beyond_the_range_of_16_bits_may_be_infinite() -> None:
    """90,000 in float16, as tensor cores take it, and in float32; half of it is no infinity."""
    a, b = torch.full((4, 3), 300.0).half(), torch.full((4, 5), 1e-3).half()

    def product(factor: float) -> Tensor:
        return ((a.float() * factor).T @ b.float()).half()

    rounded = ((a.float() * 300).half().float().T @ b.float()).half()
    assert bool(torch.isinf(rounded).all())
    assert judged(rounded, partial(product, 300)).ok
    assert judged(product(300), partial(product, 300)).ok
    assert not judged(rounded, partial(product, 150)).ok


def test_a_convolution_takes_a_computed_factor_in_16_bits() -> None:
    """As a product does: the same kernel beside `F.linear` passed, and beside a convolution of width 1 was accused."""
    generator = torch.Generator().manual_seed(2)
    x, w = torch.randn(3, 4, 9, generator=generator).bfloat16(), torch.randn(5, 4, 1, generator=generator).bfloat16()

    def reference(once: bool = False) -> Tensor:
        value = F.silu(x.float() * 1.3)
        return F.conv1d(value.bfloat16().float() if once else value, w.float()).bfloat16()

    assert judged(reference(once=True), reference).ok
    assert not judged(reference(once=True) * 1.02, reference).ok


def turned(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def turned_into(x: Tensor, angle: Tensor) -> Tensor:
    """The same, each half written where it belongs."""
    wide = x.float()
    a, b = wide.clone().chunk(2, -1)
    out = torch.empty_like(wide)
    out[:, : a.shape[1]] = a * angle.cos()
    out[:, a.shape[1] :] = b * angle.cos()
    out[:, : a.shape[1]].sub_(b.mul_(angle.sin()))
    out[:, a.shape[1] :].add_(a.mul_(angle.sin()))
    return out


@pytest.mark.parametrize("turned", [turned, turned_into])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@sweep("seed", range(4))
def test_both_factors_may_be_computed_from_16_bits(
    seed: int, dtype: torch.dtype, turned: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Queries and keys are turned in float32 and stored in 16 bits again, where they came in 16 bits."""
    generator = torch.Generator().manual_seed(seed)
    q, k = ((1.5 * torch.randn(16, 8, generator=generator)).to(dtype) for _ in range(2))
    v, angle = torch.randn(16, 9, generator=generator).to(dtype), torch.randn(16, 4, generator=generator)

    def attended(once: bool = False, low: torch.dtype = torch.float32) -> Tensor:
        a, b = turned(q, angle), turned(k, angle)
        a, b = (a.bfloat16().float(), b.bfloat16().float()) if once else (a, b)
        score = (a @ b.T).to(low).float() / 8**0.5
        return (score.softmax(-1) @ v.float()).to(dtype)

    assert judged(attended(once=True), attended).ok is (dtype == torch.bfloat16)
    assert not judged((attended(once=True) * 1.03).to(dtype), attended).ok
    assert not judged(attended(once=True, low=torch.float8_e4m3fn), attended).ok
