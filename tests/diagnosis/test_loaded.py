"""What a kernel makes of inputs as it loads them, beside what it loses later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion import dim, tensor, values
from pytest_fusion.diagnosis.diagnose import diagnose
from pytest_fusion.diagnosis.rules.loaded import rounded
from tests.sweeps import sweep

T = torch.Tensor
MIXED = {
    "x": tensor("rows n", values=values.normal()),
    "w": tensor("rows n", values=values.uniform(0.5, 2)),
}
BOUNDS = {"rows": dim(1), "n": dim(1)}
SIZES = {"dim rows": 2, "dim n": 3}


def coarse(t: T, dtype: torch.dtype) -> T:
    return t.to(dtype).float()


def mixed(x: T, w: T) -> T:
    return (x * w).sum(-1)


def ranked(x: T, w: T) -> T:
    return torch.sort(x + 0 * w, dim=-1, stable=True).indices


ROUNDED: dict[str, tuple[Callable[[T, T], T], Callable[[T, T], T], str]] = {
    "w as bfloat16": (lambda x, w: mixed(x, coarse(w, torch.bfloat16)), mixed, "w hold numbers of bfloat16"),
    "w as float16": (lambda x, w: mixed(x, coarse(w, torch.float16)), mixed, "w hold numbers of float16"),
    "both": (
        lambda x, w: mixed(coarse(x, torch.bfloat16), coarse(w, torch.bfloat16)),
        mixed,
        "x and w hold numbers of bfloat16",
    ),
    "compared": (lambda x, w: ranked(coarse(x, torch.bfloat16), w), ranked, "x hold numbers of bfloat16"),
}


@sweep("name", ROUNDED, fast=("compared",))
def test_inputs_that_are_rounded_first_are_named(lab_of: Any, name: str) -> None:
    """One of two factors, both, and what is only compared, in a result of integers."""
    fused, reference, told = ROUNDED[name]
    sizes = {"dim rows": 4, "dim n": 60} if name == "compared" else SIZES
    found = diagnose(lab_of(fused, reference, MIXED, sizes, dims=BOUNDS, dtypes="float32"))
    assert (found.cause, told in found.evidence[0]) == ("cast-order", True), found


OTHERWISE: dict[str, Callable[[T, T], T]] = {
    "a product in 16 bits": lambda x, w: coarse(x * w, torch.bfloat16).sum(-1),
    "a sum in 16 bits": lambda x, w: (x * w).bfloat16().cumsum(-1)[:, -1].float(),
    "another formula": lambda x, w: (x * w.square()).sum(-1),
    "beside round numbers": lambda x, w: mixed(x, w) + (x.view(torch.int32) & 0x7F != 0).any(-1),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_rounded_later_is_wrong_of_coarse_numbers_too(lab_of: Any, name: str) -> None:
    """Products and sums of numbers of 16 bits have more digits than these."""
    assert rounded(lab_of(OTHERWISE[name], mixed, MIXED, SIZES, dims=BOUNDS, dtypes="float32")) is None


PACKED = {
    "q": tensor("rows m", dtype=torch.uint8, values=values.integers(0, 255)),
    "scale": tensor("rows", values=values.positive(0.01, 1)),
    "zero": tensor("rows", dtype=torch.uint8, values=values.integers(0, 15)),
}
WORDS = {"q": tensor("rows m", dtype=torch.int32, values=values.integers(-(2**31), 2**31 - 1))}


def nibbles(q: T, scale: T, zero: T) -> T:
    codes = torch.stack([q & 15, q >> 4], -1).flatten(-2)
    return (codes.float() - zero[:, None].float()) * scale[:, None]


def nibbles_of_signed(q: T, scale: T, zero: T) -> T:
    s = q.contiguous().view(torch.int8)
    codes = torch.stack([s & 15, s >> 4], -1).flatten(-2)
    return (codes.float() - zero[:, None].float()) * scale[:, None]


def nibbles_less_zero_in_bytes(q: T, scale: T, zero: T) -> T:
    codes = torch.stack([q & 15, q >> 4], -1).flatten(-2)
    return (codes - zero[:, None]).float() * scale[:, None]


def codes_of_words(q: T) -> T:
    return torch.stack([(q >> shift) & 15 for shift in range(0, 32, 4)], -1).flatten(-2)


def codes_of_signed_words(q: T) -> T:
    return torch.stack([*((q >> shift) & 15 for shift in range(0, 28, 4)), q >> 28], -1).flatten(-2)


BITS: dict[str, tuple[Callable[..., T], Callable[..., T], dict[str, Any], str]] = {
    "a byte": (nibbles_of_signed, nibbles, PACKED, "right once the top bit of each number of q is 0"),
    "a word": (codes_of_signed_words, codes_of_words, WORDS, "right once the top bit of each number of q is 0"),
    "a difference": (nibbles_less_zero_in_bytes, nibbles, PACKED, "off by a multiple of 2^8"),
}


@pytest.mark.parametrize("name", BITS)
def test_bits_that_are_taken_for_others_are_named(lab_of: Any, name: str) -> None:
    """A nibble that is shifted with its sign, out of a byte and a word, and a zero point taken away in bytes."""
    fused, reference, inputs, told = BITS[name]
    bounds = {"rows": dim(1), "m": dim(1)}
    found = diagnose(lab_of(fused, reference, inputs, {"dim rows": 2, "dim m": 3}, dims=bounds, dtypes="float32"))
    assert (found.cause, told in found.evidence[0]) == ("overflow", True), found


@pytest.mark.slow
def test_a_zero_point_of_one_more_is_no_overflow(lab_of: Any) -> None:
    """What is off by one is so whatever the top bits are."""
    bounds = {"rows": dim(1), "m": dim(1)}
    lab = lab_of(
        lambda q, scale, zero: nibbles(q, scale, zero + 1),
        nibbles,
        PACKED,
        {"dim rows": 2, "dim m": 3},
        dims=bounds,
        dtypes="float32",
    )
    assert diagnose(lab).cause == "unexplained"
