"""Arithmetic on plain arrays against exact results."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from pytest_fusion.interpreter.compute import arith, reductions

BF16 = ml_dtypes.bfloat16


def pairs(dtype: type, count: int = 400) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    limits = np.iinfo(dtype)
    return (rng.integers(limits.min, limits.max, count, dtype), rng.integers(limits.min, limits.max, count, dtype))


@pytest.mark.parametrize("operation", ["add", "subtract", "multiply", "divide"])
def test_bfloat16_is_rounded_once(operation: str) -> None:
    """The four operations on bfloat16 equal torch's, which round the exact result once."""
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal((2, 5000)) * np.exp2(rng.uniform(-20, 20, (2, 5000)))).astype(np.float32)
    a, b = torch.from_numpy(x).bfloat16(), torch.from_numpy(y).bfloat16()
    ours = getattr(np, operation)(x.astype(BF16), y.astype(BF16))
    assert np.array_equal(ours.astype(np.float32), getattr(torch, operation)(a, b).float().numpy())


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_integer_division_truncates(dtype: type) -> None:
    """Quotients round toward zero and remainders have the dividend's sign, as in C."""
    x, y = pairs(dtype)
    y[y == 0] = 3
    y[y == -1] = -7
    quotients = [abs(int(a)) // abs(int(b)) * (1 if (a < 0) == (b < 0) else -1) for a, b in zip(x, y, strict=True)]
    assert arith.int_divide(x, y).tolist() == quotients
    remainders = [int(a) - q * int(b) for a, b, q in zip(x, y, quotients, strict=True)]
    assert arith.int_remainder(x, y).tolist() == remainders


def test_division_by_zero_gives_all_ones() -> None:
    """Integer division by zero neither warns nor stops: all bits set, remainder the dividend."""
    x, zero = np.array([5, -5], np.int32), np.zeros(2, np.int32)
    assert arith.int_divide(x, zero).tolist() == [-1, -1]
    assert arith.int_remainder(x, zero).tolist() == [5, -5]


def test_one_bit_integers_wrap() -> None:
    """True + True is False in one bit, and subtraction is the same operation."""
    x, y = np.array([True, True, False]), np.array([True, False, True])
    assert arith.binary(np.add)(x, y).tolist() == [False, True, True]
    assert arith.binary(np.subtract)(x, y).tolist() == [False, True, True]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_upper_half_of_a_product(dtype: type) -> None:
    """multiply_high is the upper half of the product of the unsigned bit patterns."""
    x, y = pairs(dtype)
    bits = 8 * np.dtype(dtype).itemsize
    expected = [(int(a) % 2**bits * (int(b) % 2**bits)) >> bits for a, b in zip(x, y, strict=True)]
    assert [int(v) % 2**bits for v in arith.multiply_high(x, y)] == expected


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_fused_multiply_add_rounds_once(dtype: type) -> None:
    """fma equals the exact rational result rounded once, cancellation included."""
    rng = np.random.default_rng(5)
    x, y = rng.uniform(0.5, 2, (2, 500)).astype(dtype)
    z = (-(x * y) * (1 + rng.uniform(-1, 1, 500) * np.finfo(dtype).eps * 4)).astype(dtype)
    z[::3] = rng.standard_normal(z[::3].size).astype(dtype)
    ours = arith.fused_multiply_add(x, y, z)
    exact = [Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)) for a, b, c in zip(x, y, z, strict=True)]
    for value, truth in zip(ours, exact, strict=True):
        neighbours = (np.nextafter(value, dtype(-np.inf)), np.nextafter(value, dtype(np.inf)))
        error = abs(Fraction(float(value)) - truth)
        assert all(error <= abs(Fraction(float(n)) - truth) for n in neighbours)


def test_fused_multiply_add_breaks_a_hidden_tie() -> None:
    """1 + 2**-24 + 2**-60 lies above a tie of float32, which a float64 sum rounded again would lose."""
    x = np.array([1.0], np.float32)
    y = np.array([2.0**-24 * (1 + 2.0**-23)], np.float32)
    tiny = np.array([2.0**-24], np.float32)
    assert arith.fused_multiply_add(tiny, np.array([1 + 2.0**-20], np.float32), x)[0] == np.float32(1 + 2.0**-23)
    assert arith.fused_multiply_add(x, y, x)[0] == np.float32(1 + 2.0**-23)


def test_clamp_prefers_numbers_unless_told_otherwise() -> None:
    """A NaN becomes the lower bound without propagation and stays NaN with it."""
    value, low, high = (np.array([v], np.float32) for v in (np.nan, -1, 1))
    assert arith.clamp(value, low, high, propagate_nan=False)[0] == -1
    assert np.isnan(arith.clamp(value, low, high, propagate_nan=True)[0])


@pytest.mark.parametrize("dtype", [np.float16, BF16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_dot_accumulates_in_float32(dtype: type) -> None:
    """Products of narrow floats are exact and summed in float32: 2048 ones do not stick at 256."""
    ones = np.ones((1, 2048), dtype)
    assert arith.dot(ones, ones.T, np.zeros((1, 1), np.float32))[0, 0] == 2048.0


def test_dot_rounds_a_float16_accumulator_every_step() -> None:
    """A float16 accumulator stops growing at 2**15 where adding 16 no longer changes it, as on tensor cores."""
    ones = np.ones((1, 64), np.float16)
    start = np.full((1, 1), 2.0**15, np.float16)
    assert arith.dot(ones, ones.T, start)[0, 0] == 2.0**15
    assert arith.dot(ones, ones.T, start.astype(np.float32))[0, 0] == 2.0**15 + 64


@pytest.mark.parametrize("shape", [(16, 32, 32), (64, 32, 64), (128, 16, 16)], ids=str)
def test_dot_has_the_same_bits_anywhere_in_a_tile(shape: tuple[int, int, int]) -> None:
    """Equal rows and equal columns, among one program's or many's: BLAS has other kernels for a product's last ones."""
    rows, inner, columns = shape
    random = np.random.default_rng(0)
    row, column = random.standard_normal((2, 5, 1, inner), np.float32)
    a, b = random.standard_normal((5, rows, inner), np.float32), random.standard_normal((5, inner, columns), np.float32)
    by_row = arith.dot(np.repeat(row, rows, axis=1), b, np.zeros((5, rows, columns), np.float32))
    by_column = arith.dot(a, np.repeat(column, columns, axis=1).reshape(5, columns, inner).swapaxes(1, 2), by_row * 0)
    alone = arith.dot(a[:1], b[:1], np.zeros((1, rows, columns), np.float32))

    assert (by_row == by_row[:, :1]).all()
    assert (by_column == by_column[:, :, :1]).all()
    assert (alone[0] == arith.dot(a, b, by_row * 0)[0]).all()


def test_integer_dot_is_exact() -> None:
    """int8 products sum to the integer itself, and the int32 accumulator wraps."""
    a = np.full((2, 64), -128, np.int8)
    assert (arith.dot(a, a.T, np.zeros((2, 2), np.int32)) == 64 * 128 * 128).all()
    assert (arith.dot(a, a.T, np.full((2, 2), 2**31 - 1, np.int32)) < 0).all()


def test_histogram_drops_what_is_outside() -> None:
    """Values below zero, at or above the bins and masked ones are not counted."""
    data = np.array([[0, 1, 1, 4, -1, 3], [3, 3, 0, 0, 0, 0]], np.int32)
    mask = np.array([[True, True, True, True, True, False]] * 2)
    assert arith.histogram(data, mask, 4).tolist() == [[1, 2, 0, 0], [3, 0, 0, 2]]


def test_float_sums_are_trees_in_their_own_type() -> None:
    """4096 bfloat16 ones add up to 4096 in a tree and would stick at 256 one by one."""
    ones = np.ones((4096, 1), BF16)
    assert float(reductions.fold(ones, 0, np.add)[0, 0]) == 4096.0


@pytest.mark.parametrize("length", [1, 2, 5, 8, 13])
def test_trees_keep_order(length: int) -> None:
    """Reducing and scanning with an associative, non-commutative function gives what one by one gives."""
    rng = np.random.default_rng(length)
    a, b = rng.integers(1, 4, (2, 3, length)).astype(np.int64)

    def combine(left: list[np.ndarray], right: list[np.ndarray]) -> list[np.ndarray]:
        return [left[0] * right[0], left[1] * right[0] + right[1]]

    expected = np.zeros((3, length), np.int64)
    state = np.zeros(3, np.int64)
    for i in range(length):
        state = state * a[:, i] + b[:, i]
        expected[:, i] = state
    assert np.array_equal(reductions.scan_tree([a, b], 1, combine)[1], expected)
    assert np.array_equal(reductions.reduce_tree([a, b], 1, combine)[1][:, 0], expected[:, -1])


def test_all_ones_of_an_unsigned_type() -> None:
    """~x works on uint32: all bits set, which numpy 2 refuses to make from -1."""
    assert arith.all_ones(np.dtype(np.uint32))[0] == 2**32 - 1
    with pytest.raises(TypeError, match="integers"):
        arith.all_ones(np.dtype(np.float32))
