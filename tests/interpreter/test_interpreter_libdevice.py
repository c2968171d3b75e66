"""libdevice by symbol, against torch in float64 and against Python's integers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pytest_fusion.interpreter.compute import libdevice

F32, F64, I32, I64 = (np.dtype(t) for t in (np.float32, np.float64, np.int32, np.int64))

UNARY = {
    "tanh": torch.tanh, "rsqrt": torch.rsqrt, "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1,
    "log": torch.log, "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p, "sqrt": torch.sqrt,
    "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "sinh": torch.sinh, "cosh": torch.cosh,
    "asin": torch.asin, "acos": torch.acos, "atan": torch.atan, "asinh": torch.asinh, "acosh": torch.acosh,
    "atanh": torch.atanh, "erf": torch.erf, "erfc": torch.erfc, "erfinv": torch.erfinv, "erfcx": torch.special.erfcx,
    "normcdf": torch.special.ndtr, "normcdfinv": torch.special.ndtri, "lgamma": torch.lgamma, "fabs": torch.abs,
    "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "rint": torch.round, "nearbyint": torch.round,
    "cyl_bessel_i0": torch.special.i0,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(UNARY))
def test_a_float_function_is_the_true_value_rounded(name: str) -> None:
    """Each float32 function is within one unit of torch's float64 value, specials included."""
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.uniform(-4, 4, 300), rng.uniform(-1, 1, 300), rng.uniform(0, 30, 100), [0.5, 2.5, -0.0]])
    x = np.concatenate([x, [np.inf, -np.inf, np.nan, 1.0, -1.0]]).astype(np.float32)
    with np.errstate(all="ignore"):
        ours = libdevice.call(f"__nv_{name}f", [x], F32)
    expected = UNARY[name](torch.from_numpy(x).double()).float().numpy()
    both = np.isfinite(ours) & np.isfinite(expected)
    assert np.array_equal(np.isnan(ours), np.isnan(expected))
    assert np.array_equal(ours[~both], expected[~both], equal_nan=True)
    assert (np.abs(ours[both] - expected[both]) <= np.spacing(np.abs(expected[both]))).all()


@pytest.mark.parametrize(
    ("symbol", "reference"),
    [("powf", np.power), ("fmodf", np.fmod), ("atan2f", np.arctan2), ("hypotf", np.hypot), ("fdimf", None)],
)
def test_a_function_of_two_arguments(symbol: str, reference: np.ufunc | None) -> None:
    """Two-argument functions equal the float64 value rounded."""
    x, y = np.random.default_rng(4).uniform(0.1, 9, (2, 200)).astype(np.float32)
    wide = x.astype(np.float64), y.astype(np.float64)
    expected = np.maximum(wide[0] - wide[1], 0) if reference is None else reference(*wide)
    assert np.array_equal(libdevice.call(f"__nv_{symbol}", [x, y], F32), expected.astype(np.float32))


def test_round_goes_away_from_zero_and_rint_to_even() -> None:
    """round(2.5) is 3 and rint(2.5) is 2; the largest float64 below one half rounds to zero."""
    x = np.array([2.5, -2.5, 0.49999999999999994])
    assert libdevice.call("__nv_round", [x], F64).tolist() == [3.0, -3.0, 0.0]
    assert libdevice.call("__nv_rint", [x], F64).tolist() == [2.0, -2.0, 0.0]
    assert libdevice.call("__nv_llround", [x], I64).tolist() == [3, -3, 0]


def test_predicates_give_integers() -> None:
    """isnan, isinf, finite and signbit give 0 or 1 as int32."""
    x = np.array([1.0, np.nan, -np.inf, -0.0], np.float32)
    table = {"isnanf": [0, 1, 0, 0], "isinff": [0, 0, 1, 0], "finitef": [1, 0, 0, 1], "signbitf": [0, 0, 1, 1]}
    for name, expected in table.items():
        result = libdevice.call(f"__nv_{name}", [x], I32)
        assert result.tolist() == expected
        assert result.dtype == I32


def test_exponents_of_what_has_none() -> None:
    """ilogb of 0 and NaN is the least integer, of infinities the greatest, as sm_90 code selects them."""
    x = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, 12.0, -0.75, 1e-40], np.float32)
    least, greatest = -(2**31), 2**31 - 1
    expected = [least, least, least, greatest, greatest, 0, 3, -1, -133]
    assert libdevice.call("__nv_ilogbf", [x], I32).tolist() == expected


def test_directed_rounding_brackets_the_value() -> None:
    """1/3 rounded down, to nearest and up are ordered, and down and up are neighbours."""
    one, three = np.ones(1, np.float32), np.full(1, 3, np.float32)
    down, near, up = (libdevice.call(f"__nv_fdiv_r{m}", [one, three], F32)[0] for m in "dnu")
    assert down <= near <= up
    assert np.nextafter(down, np.float32(1)) == up
    assert libdevice.call("__nv_fdiv_rz", [-one, three], F32)[0] == -down


def test_conversions_round_as_named() -> None:
    """float2int_rn, _rz, _rd and _ru differ on -1.5, and infinity saturates."""
    x = np.array([-1.5, np.inf], np.float32)
    results = {m: libdevice.call(f"__nv_float2int_r{m}", [x], I32).tolist() for m in "nzdu"}
    top = 2**31 - 1
    assert results == {"n": [-2, top], "z": [-1, top], "d": [-2, top], "u": [-1, top]}


def test_bit_functions() -> None:
    """clz, popc, ffs, brev, byte_perm, mulhi, mul24 and the reinterpretations agree with Python's integers."""
    x = np.array([1, -1, 0, 0x00F0], np.int32)
    assert libdevice.call("__nv_clz", [x], I32).tolist() == [31, 0, 32, 24]
    assert libdevice.call("__nv_popc", [x], I32).tolist() == [1, 32, 0, 4]
    assert libdevice.call("__nv_ffs", [x], I32).tolist() == [1, 1, 0, 5]
    assert libdevice.call("__nv_brev", [np.array([1], np.int32)], I32).tolist() == [-(2**31)]
    a, b = np.array([0x33221100], np.int32), np.array([0x77665544], np.int32)
    assert libdevice.call("__nv_byte_perm", [a, b, np.array([0x7520], np.int32)], I32).tolist() == [0x77552200]
    assert libdevice.call("__nv_mulhi", [np.array([-5], np.int32), np.array([3], np.int32)], I32).tolist() == [-1]
    assert libdevice.call("__nv_mul24", [np.array([-5], np.int32), np.array([3], np.int32)], I32).tolist() == [-15]
    assert libdevice.call("__nv_float_as_int", [np.array([1.0], np.float32)], I32).tolist() == [0x3F800000]


def test_inverse_error_function_is_sharp_near_zero_and_one() -> None:
    """erfinv keeps relative accuracy for tiny arguments and erfcinv for tiny tails."""
    tiny = np.array([1e-12, 1e-5])
    assert np.allclose(libdevice.call("__nv_erfinv", [tiny], F64), tiny * math.sqrt(math.pi) / 2, rtol=1e-9)
    tail = np.array([1e-30])
    assert math.erfc(libdevice.call("__nv_erfcinv", [tail], F64)[0]) == pytest.approx(1e-30, rel=1e-10)


@pytest.mark.parametrize("symbol", ["__nv_jnf", "__ocml_tanh_f32", "my_function"])
def test_an_unknown_symbol_is_refused_by_name(symbol: str) -> None:
    """A function without a model raises, naming it and what helps."""
    with pytest.raises(NotImplementedError, match=rf"{symbol}.*--fusion-device cuda"):
        libdevice.call(symbol, [np.ones(1, np.float32)], F32)
