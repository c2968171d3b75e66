"""Tutorial 04: dropout with a stored mask, and with one that is drawn again from its seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.philox import philox
from tests.tutorials.common import assert_rounded, each_float, normal

triton = pytest.importorskip("triton")
tl = triton.language
SIZE = 1000


@triton.jit
def dropout_kernel(x_ptr, x_keep_ptr, output_ptr, n_elements, p, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(axis=0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    x_keep = tl.load(x_keep_ptr + offsets, mask=mask)
    output = tl.where(x_keep != 0, x / (1 - p), 0.0)
    tl.store(output_ptr + offsets, output, mask=mask)


@triton.jit
def seeded_dropout_kernel(x_ptr, output_ptr, n_elements, p, seed, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(axis=0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    random = tl.rand(seed, offsets)
    x_keep = random > p
    output = tl.where(x_keep, x / (1 - p), 0.0)
    tl.store(output_ptr + offsets, output, mask=mask)


@triton.jit
def random_kernel(output_ptr, n_elements, seed, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(axis=0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(output_ptr + offsets, tl.rand(seed, offsets), mask=offsets < n_elements)


def dropout(x: Tensor, x_keep: Tensor, p: float) -> Tensor:
    output = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 128),)
    dropout_kernel[grid](x, x_keep, output, x.numel(), p, BLOCK_SIZE=128)
    return output


def seeded_dropout(x: Tensor, p: float, seed: int) -> Tensor:
    output = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 128),)
    seeded_dropout_kernel[grid](x, output, x.numel(), p, seed, BLOCK_SIZE=128)
    return output


def draw(size: int, seed: int) -> Tensor:
    output = torch.empty(size)
    random_kernel[(triton.cdiv(size, 128),)](output, size, seed, BLOCK_SIZE=128)
    return output


def uniform(size: int, seed: int) -> Tensor:
    """``tl.rand(seed, arange(size))``: the first word, folded to 31 bits and scaled to [0, 1) in float32."""
    offsets = np.arange(size)
    zeros = np.zeros(size)
    first = philox((offsets, zeros, zeros, zeros), (seed % 2**32, seed >> 32))[0].view(np.int32)
    return torch.from_numpy(np.where(first < 0, ~first, first).astype(np.float32) * np.float32(4.6566127342e-10))


def test_philox_gives_the_known_answer() -> None:
    """The generator written here gives the answers published with Random123 (kat_vectors), so it may judge."""
    zeros = philox((0, 0, 0, 0), (0, 0))
    ones = philox((2**32 - 1,) * 4, (2**32 - 1, 2**32 - 1))
    assert [int(word) for word in zeros] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(word) for word in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    fewer = philox((0, 0, 0, 0), (0, 0), rounds=7)
    assert [int(word) for word in fewer] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("seed", [0, 123, 2**31 - 1, 5 * 2**32 + 17])
def test_rand_is_philox(seed: int) -> None:
    """Every program draws the numbers of its own offsets; wide seeds use both halves of the key."""
    assert torch.equal(draw(SIZE, seed), uniform(SIZE, seed))


@each_float
def test_dropout(dtype: torch.dtype) -> None:
    """Kept values are divided in float32 (1 - p, the quotient) and rounded once; the others are zero."""
    x = normal(SIZE, dtype=dtype)
    x_keep = (normal(SIZE, dtype=torch.float32, seed=1) > 0.3).to(torch.int32)
    assert_rounded(dropout(x, x_keep, 0.3), x_keep * x.double() / 0.7, roundings=4)


@pytest.mark.parametrize("p", [0.0, 0.25, 0.9])
@each_float
def test_seeded_dropout(dtype: torch.dtype, p: float) -> None:
    """It keeps what Philox keeps, the same again for the same seed and other ones for another.

    The float32 nearest 0.9 is up to 2**-25 away, which is five roundings of 1 - 0.9; the quotient adds one.
    """
    x = normal(SIZE, dtype=dtype)
    kept = uniform(SIZE, 123) > np.float32(p)
    output = seeded_dropout(x, p, 123)
    assert_rounded(output, kept * x.double() / (1 - p), roundings=6)
    assert torch.equal(seeded_dropout(x, p, 123), output)
    if p > 0:
        assert not torch.equal(seeded_dropout(x, p, 124), output)
