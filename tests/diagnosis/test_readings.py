"""Inputs read at other indices: one, several of one shape at once, and beside others of many dims."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fusion import dim, tensor, values
from pytest_fusion.diagnosis.diagnose import diagnose
from pytest_fusion.diagnosis.readings import readings
from pytest_fusion.spec.inputs import derived
from tests.sweeps import sweep

T = torch.Tensor


def angles(b: int, t: int, half: int, generator: torch.Generator) -> T:
    return torch.rand(b, t, half, generator=generator) * 2 - 1


ROPE = {
    "q": tensor("b h t 2*half", values=values.normal()),
    "k": tensor("b g t 2*half", values=values.normal()),
    "cos": derived(angles),
    "sin": derived(angles),
}
DIMS = {name: dim(1) for name in ("b", "h", "g", "t", "half")}
SIZES = {"dim b": 2, "dim h": 1, "dim g": 1, "dim t": 2, "dim half": 2}


def turned(x: T, cos: T, sin: T) -> T:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rope(q: T, k: T, cos: T, sin: T) -> tuple[T, T]:
    return turned(q, cos[:, None], sin[:, None]), turned(k, cos[:, None], sin[:, None])


def one_batch(t: T) -> T:
    """What a program reads that adds the row of its position and not that of its batch."""
    return t[:1].expand_as(t)


WRONG: dict[str, tuple[Any, str]] = {
    "both": (
        lambda q, k, cos, sin: rope(q, k, one_batch(cos), one_batch(sin)),
        "cos and sin read at the first index of axis 0 only",
    ),
    "one": (lambda q, k, cos, sin: rope(q, k, cos, one_batch(sin)), "sin read at the first index of axis 0 only"),
}


@sweep("name", WRONG, fast=("both",))
def test_inputs_of_one_shape_are_read_wrongly_together(lab_of: Any, name: str) -> None:
    """A rotation whose cosine and sine are the first batch's, as Liger 0.4.2 has it, beside queries of four dims."""
    fused, told = WRONG[name]
    found = diagnose(lab_of(fused, rope, ROPE, SIZES, dims=DIMS, dtypes="float32"))
    assert (found.cause, told in found.evidence[0]) == ("wrong-index-map", True), found


@pytest.mark.slow
def test_no_reading_is_named_of_another_formula(lab_of: Any) -> None:
    """A rotation the other way round is no input read elsewhere."""
    found = diagnose(
        lab_of(lambda q, k, cos, sin: rope(q, k, cos, -sin), rope, ROPE, SIZES, dims=DIMS, dtypes="float32")
    )
    assert found.cause == "unexplained", found


def test_each_input_has_its_turn(lab_of: Any) -> None:
    """The first readings are one of each input and group, and pairs are asked of three of one shape."""
    inputs = {name: tensor("rows n") for name in "abc"}
    lab = lab_of(lambda a, b, c: a + 1, lambda a, b, c: a, inputs, {"dim rows": 3, "dim n": 4}, dtypes="float32")
    x = torch.ones(3, 4)
    first = [reading.names for _, reading in zip(range(7), readings(lab, dict.fromkeys("abc", x)), strict=False)]
    assert first == [("a",), ("b",), ("c",), ("a", "b", "c"), ("a", "b"), ("a", "c"), ("b", "c")]


def starts(x: T) -> T:
    return torch.cat([x.new_ones(1), (x[1:] != x[:-1]).to(x.dtype)])[: len(x)]


def runs(x: T) -> T:
    """By element, how many runs of equal numbers have begun."""
    return starts(x).cumsum(0)


def runs_in_blocks(x: T) -> T:
    """Each block of 16 begins a run."""
    return torch.cat([starts(part) for part in x.split(16)]).cumsum(0)


def runs_of_the_first_block(x: T) -> T:
    return runs(x[torch.arange(len(x)) % 16])


def rising(n: int, generator: torch.Generator) -> T:
    return torch.randint(0, 7, (n,), generator=generator).sort().values


@pytest.mark.parametrize(
    ("fused", "cause"), [(runs_in_blocks, "block-limit"), (runs_of_the_first_block, "wrong-index-map")]
)
def test_one_element_past_a_block_is_no_proof_of_the_first_again(lab_of: Any, fused: Any, cause: str) -> None:
    """Of sorted numbers the 17th begins a run beside the first as well as by itself; the 33rd and more tell."""
    inputs = {"x": derived(rising)}
    lab = lab_of(fused, runs, inputs, {"dim n": 17}, dims={"n": dim(1)}, blocks=(16,))
    found = diagnose(lab)
    assert found.cause == cause, found
