"""Fill patterns: what they are as numbers, and that no two of them can be confused."""

from __future__ import annotations

import pytest
import torch

from pytest_fusion.run.memory.fill import FILLS, pattern, supported, word

FLOATS = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip
INTEGERS = [
    torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
]  # fmt: skip
ALL = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128]


def decoded(dtype: torch.dtype, fill: str, variant: int = 0) -> torch.Tensor:
    return torch.frombuffer(bytearray(pattern(dtype, fill, variant)), dtype=dtype)


@pytest.mark.parametrize("variant", [0, 1, 2, 3, 200, 10_001])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats(dtype: torch.dtype, variant: int) -> None:
    """For floats "nan" is NaN and "huge" is finite and at least two thirds of, or 1e30 within, the dtype's range."""
    nan = decoded(dtype, "nan", variant).double()
    huge = decoded(dtype, "huge", variant).double()

    assert nan.isnan().all()
    assert huge.isfinite().all()
    assert huge.abs().item() >= min(1e30 * 0.99, 2 / 3 * torch.finfo(dtype).max)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers(dtype: torch.dtype) -> None:
    """For integers "nan" lies near the signed maximum, "huge" in the other half of the range."""
    nan, huge = decoded(dtype, "nan").item(), decoded(dtype, "huge").item()

    assert nan > 0.9 * 2 ** (8 * dtype.itemsize - 1)
    assert huge < -0.9 * 2 ** (8 * dtype.itemsize - 2) if dtype.is_signed else huge > nan


def test_bool() -> None:
    """For bool "nan" is True and "huge" is False, and the next region has it the other way round."""
    assert [pattern(torch.bool, fill) for fill in FILLS] == [b"\1", b"\0"]
    assert [pattern(torch.bool, fill, 1) for fill in FILLS] == [b"\0", b"\1"]


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_fills_differ(dtype: torch.dtype) -> None:
    """The two fills differ for every variant, so no element can equal both."""
    assert all(pattern(dtype, "nan", v) != pattern(dtype, "huge", v) for v in range(300))


@pytest.mark.parametrize("dtype", [d for d in ALL if "fnuz" not in str(d)], ids=str)
@pytest.mark.parametrize("fill", FILLS)
def test_neighbouring_variants_differ(dtype: torch.dtype, fill: str) -> None:
    """An even and the next odd variant differ, so that a copied guard does not look untouched."""
    assert all(pattern(dtype, fill, v) != pattern(dtype, fill, v + 1) for v in range(0, 300, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_nan_is_not_what_hardware_computes(dtype: torch.dtype) -> None:
    """A NaN that arithmetic makes is told from the fill by its bits."""
    computed = torch.tensor([float("inf"), float("nan"), -float("nan")], dtype=dtype) * 0
    made = {bytes(computed[i : i + 1].view(torch.uint8).tolist()) for i in range(3)}

    assert made.isdisjoint(pattern(dtype, "nan", v) for v in range(300))


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("fill", FILLS)
def test_word_repeats_to_the_pattern(dtype: torch.dtype, fill: str) -> None:
    """The integer word, repeated, is the element's bytes."""
    kind, value = word(dtype, fill, 5)
    bits = torch.full((dtype.itemsize // kind.itemsize,), value, dtype=kind).view(torch.uint8)

    assert bytes(bits.tolist()) == pattern(dtype, fill, 5)


def test_refusals() -> None:
    """Unknown fills and dtypes without plain elements are refused by name."""
    with pytest.raises(ValueError, match="'zero' is none of nan, huge"):
        pattern(torch.float32, "zero")
    with pytest.raises(ValueError, match="qint8"):
        pattern(torch.qint8, "nan")
    assert not supported(torch.qint8)
    assert supported(torch.bfloat16)
