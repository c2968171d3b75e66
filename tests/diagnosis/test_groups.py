"""Codes unpacked in another order, beside codes that are wrong in another way."""

from __future__ import annotations

from typing import Any

import torch

from pytest_fusion import tensor, values
from pytest_fusion.diagnosis.diagnose import diagnose
from pytest_fusion.diagnosis.rules.groups import order_in_groups
from tests.sweeps import sweep

T = torch.Tensor

BYTES = {"packed": tensor("rows 16*n", dtype=torch.uint8)}
WORDS = {
    "packed": tensor("rows n", dtype=torch.int32, values=values.integers(-(2**31), 2**31 - 1)),
    "scale": tensor("8*n", dtype=torch.float32, values=values.positive()),
}
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def codes(packed: T, *shifts: int) -> T:
    apart = packed[..., None].to(torch.int32) >> 4 * torch.tensor(shifts)
    return (apart & 15).flatten(-2)


def halves(packed: T) -> T:
    return (codes(packed, 0, 1) - 8) * 0.5


def by_words(packed: T, scale: T) -> T:
    return (codes(packed, *AWQ) - 8) * scale


@sweep(
    ("fused", "told"),
    [
        (lambda packed: (codes(packed, 1, 0) - 8) * 0.5, "in the order 1, 0"),
        (lambda packed: (codes(packed, 0, 0) - 8) * 0.5, "in the order 0, 0"),
        (lambda packed: (codes(packed, 0, 1) - 7) * 0.5, None),
        (lambda packed: (codes(packed, 0, 1) - 8) * -0.5, None),
    ],
    ids=["high first", "low twice", "zero point", "sign"],
)
def test_nibbles_of_bytes(lab_of: Any, fused: Any, told: str | None) -> None:
    """The other nibble is another index, of sixteen values that occur everywhere; another zero point or sign is not."""
    found = diagnose(lab_of(fused, halves, BYTES, {"dim rows": 1, "dim n": 1}))
    assert (found.cause == "wrong-index-map") == (told is not None), found
    assert told is None or found.evidence[0].endswith(told), found


def test_codes_of_words_beside_scales_that_stay(lab_of: Any) -> None:
    """Codes in the order of their bits, each under the scale of its place: no element is one of the right ones."""
    lab = lab_of(lambda packed, scale: (codes(packed, *range(8)) - 8) * scale, by_words, WORDS, {"dim rows": 1})
    found = diagnose(lab)
    assert found.cause == "wrong-index-map", found
    assert "of 8 along the last axis of out" in found.evidence[0]
    assert found.evidence[0].endswith(
        "in the order 0, 2, 4, 6, 1, 3, 5, 7 once all numbers of each floating input are equal"
    )


def test_few_groups_or_values_tell_no_order() -> None:
    """Signs, a handful of groups, and elements that are where they belong."""
    right = torch.arange(32.0).reshape(2, 16)
    turned = right.reshape(-1, 2).flip(1).reshape(2, 16)
    assert order_in_groups(turned, right.double()) == [1, 0]
    assert order_in_groups(right, right.double()) is None
    assert order_in_groups(turned[:, :6], right[:, :6].double()) is None
    assert order_in_groups(turned.sub(15.5).sign(), right.sub(15.5).sign().double()) is None
    assert order_in_groups(torch.where(right == 7, torch.nan, turned), right.double()) is None
