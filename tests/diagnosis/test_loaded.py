"""What a kernel makes of inputs as it loads them, beside what it loses later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion import dim, tensor, values
from pytest_fusion.diagnosis.diagnose import diagnose
from pytest_fusion.diagnosis.loaded import rounded

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


@pytest.mark.parametrize("name", ROUNDED)
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
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_rounded_later_is_wrong_of_coarse_numbers_too(lab_of: Any, name: str) -> None:
    """Products and sums of numbers of 16 bits have more digits than these."""
    assert rounded(lab_of(OTHERWISE[name], mixed, MIXED, SIZES, dims=BOUNDS, dtypes="float32")) is None
