"""Conversions against torch, or against the hardware's documented result where torch does otherwise."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from pytest_fusion.interpreter.bridge.numpy_dtypes import BFLOAT16, numpy_dtype, poison
from pytest_fusion.interpreter.compute.casts import convert, round_to_odd

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)


def floats(count: int, spread: float = 40.0) -> np.ndarray:
    """float32 of all magnitudes, both signs, ties and specials among them."""
    rng = np.random.default_rng(7)
    values = rng.standard_normal(count) * np.exp2(rng.uniform(-spread, spread, count))
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1.0625, 1.1875, 464, 448, 57344, 2**-10, 3 * 2**-11, 0.0, -0.0])
    return np.concatenate([values, ties, -ties, [np.inf, -np.inf, np.nan]]).astype(np.float32)


def same(ours: np.ndarray, theirs: torch.Tensor) -> bool:
    """Equal bits, any NaN being as good as another."""
    wide = ours.astype(np.float64)
    expected = theirs.double().numpy()
    numbers = ~np.isnan(expected)
    signs = np.array_equal(np.signbit(wide[numbers]), np.signbit(expected[numbers]))
    return bool(np.array_equal(wide, expected, equal_nan=True) and signs)


@pytest.mark.parametrize(("target", "torch_type"), [(BFLOAT16, torch.bfloat16), (np.dtype(np.float16), torch.float16)])
def test_float32_rounds_to_nearest_even(target: np.dtype, torch_type: torch.dtype) -> None:
    """float32 becomes bfloat16 and float16 exactly as in torch; upstream truncates bfloat16."""
    values = floats(4000)
    with np.errstate(all="ignore"):
        assert same(convert(values, target), torch.from_numpy(values).to(torch_type))


@pytest.mark.parametrize(("target", "torch_type"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
@pytest.mark.parametrize("source", [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16])
def test_float8_rounds_to_nearest_even_and_saturates(
    target: np.dtype, torch_type: torch.dtype, source: np.dtype
) -> None:
    """cvt.rn.satfinite: within range as torch's cast, beyond it the largest finite value, NaN stays NaN."""
    with np.errstate(all="ignore"):
        values = floats(4000, spread=18.0).astype(source)
        wide = torch.from_numpy(values.astype(np.float32))
        limit = torch.finfo(torch_type).max
        expected = torch.where(wide.isnan(), wide, wide.clamp(-limit, limit)).to(torch_type)
        assert same(convert(values, target), expected.float())


def test_infinity_saturates_in_float8() -> None:
    """Infinity becomes the largest finite float8, which torch's cast to e4m3 turns into NaN."""
    values = np.array([np.inf, -np.inf, 1e6], np.float32)
    assert convert(values, E4M3).astype(np.float32).tolist() == [448.0, -448.0, 448.0]
    assert convert(values, E5M2).astype(np.float32).tolist() == [57344.0, -57344.0, 57344.0]


@pytest.mark.parametrize(
    ("target", "torch_type"),
    [
        (E4M3, torch.float8_e4m3fn),
        (E5M2, torch.float8_e5m2),
        (np.dtype(ml_dtypes.float8_e4m3fnuz), torch.float8_e4m3fnuz),
        (np.dtype(ml_dtypes.float8_e5m2fnuz), torch.float8_e5m2fnuz),
    ],
)
def test_every_float8_code_decodes_as_in_torch(target: np.dtype, torch_type: torch.dtype) -> None:
    """All 256 codes mean the same number as in torch, NaN codes included."""
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes.copy()).view(torch_type).float()
    assert same(convert(codes.view(target), np.dtype(np.float32)), expected)


def test_rounding_toward_zero_never_grows() -> None:
    """With toward_zero no magnitude grows, and an overflow stops at the largest finite value."""
    values = floats(2000, spread=12.0)
    values = np.concatenate([values[np.isfinite(values)], np.array([7e4, -7e4], np.float32)])
    with np.errstate(all="ignore"):
        half = convert(values, np.dtype(np.float16), toward_zero=True)
        brain = convert(values, BFLOAT16, toward_zero=True)
    assert (np.abs(half.astype(np.float32)) <= np.abs(values)).all()
    assert half[-2:].tolist() == [65504.0, -65504.0]
    truncated = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    assert np.array_equal(brain.astype(np.float32), truncated)


def test_float64_to_bfloat16_is_rounded_once() -> None:
    """A float64 just above a tie of bfloat16 goes up, though float32 would round it onto the tie and then down."""
    above_tie = np.array([1 + 2**-8 + 2**-40])
    assert convert(above_tie, BFLOAT16).astype(np.float64)[0] == 1 + 2**-7
    assert above_tie.astype(np.float32).astype(BFLOAT16).astype(np.float64)[0] == 1.0


def test_round_to_odd_keeps_exact_values() -> None:
    """A float64 that float32 holds is not touched by rounding to odd."""
    values = floats(1000)
    with np.errstate(all="ignore"):
        assert np.array_equal(round_to_odd(values.astype(np.float64)), values, equal_nan=True)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        # Read off PTX for sm_90: cvt.rzi.s16.f32 and a byte store, so 300 wraps and 70000 saturates at 32767 first.
        (np.int8, [1, -1, 44, -1, 0, 0, -1]),
        (np.uint8, [1, 0, 44, 255, 0, 0, 255]),
        (np.int16, [1, -1, 300, 32767, -32768, 0, 32767]),
        (np.int32, [1, -1, 300, 70000, -(2**31), 0, 2**31 - 1]),
        (np.uint32, [1, 0, 300, 70000, 0, 0, 2**32 - 1]),
        (np.int64, [1, -1, 300, 70000, -(2**63), -(2**63), 2**63 - 1]),
    ],
)
def test_float_to_integer_truncates_and_saturates(target: type, expected: list[int]) -> None:
    """Conversion truncates toward zero and saturates; NaN is 0, or the lowest int64."""
    values = np.array([1.9, -1.9, 300.7, 70000.5, -np.inf, np.nan, np.inf], np.float32)
    assert convert(values, np.dtype(target)).tolist() == expected


def test_integer_to_float16_is_rounded_once() -> None:
    """2049 * 2**k + 1 lies just above a tie of float16, which float32 would hide for a large k."""
    value = np.array([(2049 << 14) + 1], np.int32)
    brain = np.array([(257 << 20) + 1], np.int32)
    assert convert(brain, BFLOAT16).astype(np.int64)[0] == 258 << 20
    with np.errstate(all="ignore"):
        assert np.isinf(convert(value, np.dtype(np.float16)).astype(np.float64)[0])


def test_integers_wrap_and_booleans_take_the_last_bit() -> None:
    """Integer casts keep the low bits; a cast to one bit keeps the lowest one."""
    values = np.array([-1, 255, 256, 2**31 - 1], np.int32)
    assert convert(values, np.dtype(np.int8)).tolist() == [-1, -1, 0, -1]
    assert convert(values, np.dtype(np.uint16)).tolist() == [65535, 255, 256, 65535]
    assert convert(values, np.dtype(np.bool_)).tolist() == [True, True, False, True]


def test_poison_is_never_a_harmless_value() -> None:
    """Poison is NaN for floats and a large positive number for integers of each width."""
    for dtype in (
        np.float16,
        np.float32,
        np.float64,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
    ):
        assert np.isnan(np.float64(poison(np.dtype(dtype))))
    assert poison(np.dtype(np.int8)) == 0x7F
    assert poison(np.dtype(np.int32)) == 0x7F7F7F7F
    assert poison(np.dtype(np.uint64)) == 0x7F7F7F7F7F7F7F7F


def test_a_type_without_numbers_is_refused_by_name() -> None:
    """fp8e4b15 has no model, and the error says so and what there is."""

    class Scalar:
        name = "fp8e4b15"

        def is_ptr(self) -> bool:
            return False

    class Type:
        scalar = Scalar()

    with pytest.raises(NotImplementedError, match=r"fp8e4b15.*bf16"):
        numpy_dtype(Type())
