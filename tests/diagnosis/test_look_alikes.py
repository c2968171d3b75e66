"""Failures that look like a partial tile's, an epsilon's or an overflow's by the values that inputs happen to have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytest_fusion import dim, tensor, values
from pytest_fusion.diagnosis.causes import CAUSES
from pytest_fusion.diagnosis.diagnose import diagnose
from pytest_fusion.diagnosis.experiments import ordinary
from pytest_fusion.diagnosis.rules.indices import cached
from pytest_fusion.spec.inputs import derived
from tests.diagnosis.wrong import (
    drops_tail_of_sum,
    pads_maximum_with_zero,
    scale,
    scale_with_small_floor,
    total,
    valued,
)
from tests.sweeps import sweep

T = torch.Tensor

ROWS = {"x": tensor("rows hidden")}
FLOAT32: dict[str, Any] = {"dtypes": "float32"}


def groups(x: T) -> T:
    """The largest of each 32 of a row."""
    return F.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32)).abs().amax(-1)


def exponent(x: T) -> T:
    """Of each group's largest, as the scale of a microscaling format."""
    return torch.frexp(groups(x)).exponent.to(torch.float32)


def exponent_rounded_up(x: T) -> T:
    """Below 1.5, which the largest of 32 normal numbers hardly ever is."""
    low = (groups(x) < 1.5) & (groups(x) > 2.0**-5)
    return torch.frexp(groups(x)).exponent + low.to(torch.float32)


@sweep(
    ("fused", "reference", "regime", "cause"),
    [
        (exponent_rounded_up, exponent, "unit", "unexplained"),
        (drops_tail_of_sum, total, "unit", "tail-mask"),
        (pads_maximum_with_zero, lambda x: x.amax(-1), "negative", "wrong-neutral-element"),
    ],
    ids=["what a tile holds", "a tail", "its padding"],
    fast=("a tail", "its padding"),
)
def test_a_whole_tile_of_one_element_tells_its_end_from_its_values(
    lab_of: Any, fused: Any, reference: Any, regime: str, cause: str
) -> None:
    """A largest element of 2 to 3, as 32 numbers have it, is right; any other is wrong, in whole tiles too."""
    sizes = {"dim rows": 1, "dim hidden": 1}
    lab = lab_of(
        fused, reference, ROWS, sizes, blocks=(16, 32), change=valued(regime), dims={"hidden": dim(1)}, **FLOAT32
    )
    found = diagnose(lab)
    assert found.cause == cause, found


def test_a_floor_of_small_values_is_named(lab_of: Any) -> None:
    """Values so small that a floor takes over are wrong, and others are right."""
    sizes = {"dim rows": 3, "dim hidden": 4}
    lab = lab_of(scale_with_small_floor, scale, ROWS, sizes, change=valued("small"), dims={"hidden": dim(2)}, **FLOAT32)
    found = diagnose(lab)
    assert found.cause == "eps-misplaced", found


def capped_score(x: T) -> T:
    return torch.logsumexp(30 * torch.tanh(x / 30), -1)


def capped_score_of_padding(x: T) -> T:
    """Rows are padded with -inf to a power of two before the cap makes -30 of it."""
    padded = F.pad(x, (0, (1 << max(x.shape[-1] - 1, 0).bit_length()) - x.shape[-1]), value=-torch.inf)
    return torch.logsumexp(30 * torch.tanh(padded / 30), -1)


def fourth_powers(x: T) -> T:
    return torch.log1p(x.double().pow(4).sum(-1)).float()


def fourth_powers_in_float32(x: T) -> T:
    return torch.log1p(x.pow(4).sum(-1))


@pytest.mark.parametrize(
    ("fused", "reference", "causes"),
    [
        (capped_score_of_padding, capped_score, ("tail-mask", "wrong-neutral-element")),
        (fourth_powers_in_float32, fourth_powers, ("overflow",)),
    ],
    ids=["padding", "powers"],
)
def test_large_values_at_a_partial_tile_are_no_overflow(
    lab_of: Any, fused: Any, reference: Any, causes: tuple[str, ...]
) -> None:
    """Right once values are small, as an overflow is; yet right at whole tiles too, where only a few are padded."""
    sizes = {"dim rows": 1, "dim hidden": 3}
    lab = lab_of(fused, reference, ROWS, sizes, change=valued("huge"), dims={"hidden": dim(1)}, **FLOAT32)
    found = diagnose(lab)
    assert found.cause in causes, found


def normed(x: T) -> T:
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5)


def normed_by_squares(x: T) -> T:
    mean = x.sum(-1, keepdim=True) / x.shape[-1]
    return (x - mean) * torch.rsqrt(x.square().sum(-1, keepdim=True) / x.shape[-1] - mean * mean + 1e-5)


def normed_but_smooth(x: T) -> T:
    """Off by a millionth, by a formula of the values and no rounding."""
    return (normed(x).double() * (1 + 3e-5 * torch.cos(x.double()) * (x != x.round()))).to(x.dtype)


NARROWED = {
    "normal": values.normal(0, 1),
    "another mean": values.normal(3, 1),
    "uniform": values.uniform(-1, 2),
    "any": values.finite(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROWED)
def test_digits_are_lost_of_narrowed_values_too(lab_of: Any, name: str) -> None:
    """A variance by a difference of squares is one of normal numbers as of any; a formula that is off is none."""
    lost = "low-precision-accumulation"
    inputs = {"x": tensor("rows hidden", values=NARROWED[name])}
    sizes = {"dim rows": 24, "dim hidden": 2, "dtype": "float32"}
    for fused, causes in ((normed_by_squares, {lost}), (normed_but_smooth, set(CAUSES) - {lost})):
        for seed in range(100):
            try:
                lab = lab_of(
                    fused, normed, inputs, sizes, dims={"hidden": dim(2)}, **FLOAT32,
                    change=lambda case, seed=seed: case.with_(seed=seed),
                )  # fmt: skip
            except AssertionError:
                continue
            break
        found = diagnose(lab)
        assert found.cause in causes, found


def up_to(x: T, lengths: T) -> T:
    return x.masked_fill(torch.arange(x.shape[1]) >= lengths[:, None], 0.0)


@pytest.mark.slow
def test_lengths_that_are_equal_in_a_first_call_are_not_kept(lab_of: Any) -> None:
    """Who takes the first length for all is right where both are equal, and wrong as if they still were by chance."""
    inputs = {
        "x": tensor("rows n", values=values.normal()),
        "lengths": derived(lambda rows, n, generator: 1 + torch.randint(0, n + 1, (rows,), generator=generator) % 2),
    }
    bounds, sizes = {"rows": dim(2, 2), "n": dim(2)}, {"dim rows": 2, "dim n": 2}
    equal = 0
    for seed in range(60):
        try:
            lab = lab_of(
                lambda x, lengths: up_to(x, lengths[:1]), up_to, inputs, sizes, dims=bounds, dtypes="float32",
                change=lambda case, seed=seed: case.with_(seed=seed),
            )  # fmt: skip
        except AssertionError:
            continue
        assert cached(lab) is None, seed
        equal += lab.attempt(lab.grown(ordinary(lab.base, ["x"]), (14, 22, 6, 10))).right
    assert equal
