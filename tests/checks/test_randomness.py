"""Kernels with dropout and other noise: the reference is told their mask, and their random numbers are judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from pytest_fusion import dim, rng
from pytest_fusion.case import counter_random
from pytest_fusion.errors import SpecError
from pytest_fusion.report.record import TestRecord
from pytest_fusion.spec.inputs import tensor
from tests.sweeps import sweep

T = torch.Tensor
SEEDS = st.integers(0, 2**31 - 1)
INPUTS = {"x": tensor("rows cols"), "seed": SEEDS, "p": st.sampled_from([0.1, 0.5, 0.0, 1.0])}


def uniform(shape: Any, *seed: int) -> T:
    return counter_random.uniform(tuple(shape), counter_random.mix(*seed), "cpu")


def apply(x: T, kept: T, p: float) -> T:
    return torch.where(kept, x * (1 / (1 - p) if p < 1 else 0.0), 0.0)


def reference(x: T, seed: int, p: float, mask: T) -> T:
    return apply(x, mask, p)


def dropout(x: T, seed: int, p: float) -> T:
    return apply(x, uniform(x.shape, seed) >= p, p)


def by_address(x: T, seed: int, p: float) -> T:
    """Numbers by the element's place in memory, as an offset made of strides has it."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    if not x.numel():
        return x.clone()
    return apply(x, torch.as_strided(uniform((reach,), seed), x.shape, x.stride(), 0) >= p, p)


def moved(x: T, seed: int, p: float) -> T:
    """Seed and offset added up: the next seed's numbers are this one's, moved by one."""
    keys = (seed + torch.arange(x.numel())) * 0x9E3779B1 % 2**32
    drawn = ((keys ^ keys >> 15) * 0x85EBCA6B % 2**32 ^ (keys >> 13)) * 0xC2B2AE35 % 2**32
    return apply(x, (drawn.double() / 2**32).reshape(x.shape) >= p, p)


PLANTED: dict[str, tuple[Callable[..., T], str, str]] = {
    "the seed is ignored": (lambda x, seed, p: dropout(x, 7, p), "repeat", "seed-ignored"),
    "the seed is a byte": (lambda x, seed, p: dropout(x, seed & 0xFF, p), "repeat", "seed-ignored"),
    "the seed is of 16 bits": (lambda x, seed, p: dropout(x, seed % 2**16, p), "repeat", "seed-ignored"),
    "the seed is of 24 bits": (lambda x, seed, p: dropout(x, seed % 2**24, p), "repeat", "seed-ignored"),
    "seeds overlap": (moved, "repeat", "repeated-mask"),
    "every row has one mask": (
        lambda x, seed, p: apply(x, (uniform(x.shape[1:], seed) >= p).expand(x.shape), p),
        "values",
        "repeated-mask",
    ),
    "p is the share that is kept": (
        lambda x, seed, p: apply(x, uniform(x.shape, seed) < p, p),
        "values",
        "biased-mask",
    ),
    "a share too small": (lambda x, seed, p: apply(x, uniform(x.shape, seed) >= p**1.5, p), "values", "biased-mask"),
    "numbers by address": (by_address, "repeat", "mask-mismatch"),
}


@sweep(
    "name",
    PLANTED,
    fast=("a share too small", "numbers by address"),
)
def test_wrong_random_numbers_fail(examine: Any, name: str) -> None:
    """Each mask fits the values that come with it, and is caught by what it depends on."""
    fused, check, cause = PLANTED[name]
    record: TestRecord = examine(fused, reference, INPUTS, cases=60, rng="seed")
    assert (record.verdict, record.failed_check, record.cause) == ("fail", check, cause), record.message


def test_a_kept_answer_shows_beside_another_mask(examine: Any) -> None:
    """What the first values left unseen of dropout is looked for again, and an answer kept from them is still wrong."""
    kept: dict[Any, T] = {}

    def fused(x: T, on: T, seed: int, p: float) -> T:
        return kept.setdefault(
            (x.data_ptr(), on.data_ptr(), x.shape, x.dtype, seed, p), dropout(x * on, seed, p)
        ).clone()

    def right(x: T, on: T, seed: int, p: float, mask: T) -> T:
        return apply(x * on, mask, p)

    inputs = {**INPUTS, "on": tensor("rows cols", dtype=torch.bool)}
    record: TestRecord = examine(
        fused, right, cases=20, inputs=inputs, rng="seed", dims={"rows": dim(3), "cols": dim(3)}
    )

    # Where the allocator hands an address out again by chance, two equal runs differ first.
    assert record.failed_check == "repeat", record.message
    assert record.cause in ("cached-answer", "nondeterministic"), record.message


@pytest.mark.slow
def test_dropping_at_probability_zero_fails(examine: Any) -> None:
    """A kernel that drops every eighth element at p=0 is told so in the first such case."""

    def fused(x: T, seed: int, p: float) -> T:
        every = (torch.arange(x.numel()) % 8 == 7).reshape(x.shape)
        return apply(x, (uniform(x.shape, seed) >= p) & ~(every & (p == 0)), p)

    record = examine(fused, reference, INPUTS, cases=60, rng="seed")
    assert (record.failed_check, record.cause) == ("values", "biased-mask"), record.message
    assert "dropped though the probability to drop is 0" in record.message


@pytest.mark.slow
def test_values_are_judged_under_the_kernels_own_mask(examine: Any) -> None:
    """A scale that is forgotten, and an element that is wrong, fail as in any other kernel."""
    unscaled = examine(lambda x, seed, p: apply(x, uniform(x.shape, seed) >= p, 0.0), reference, INPUTS, rng="seed")
    assert unscaled.failed_check == "values", unscaled.message
    wrong = examine(lambda x, seed, p: dropout(x, seed, p).clamp_max(0.5), reference, INPUTS, rng="seed")
    assert wrong.failed_check == "values", wrong.message


class Fused(torch.autograd.Function):
    """Dropout whose backward draws again, by default the same."""

    @staticmethod
    def forward(ctx: Any, x: T, seed: int, p: float, later: int) -> T:
        ctx.given = (seed + later, p)
        return dropout(x, seed, p)

    @staticmethod
    def backward(ctx: Any, g: T) -> tuple[Any, ...]:
        return dropout(g, *ctx.given), None, None, None


@pytest.mark.slow
def test_backward_with_another_mask_fails(examine: Any) -> None:
    """The next seed in backward is a mask of its own, which the gradient of ones shows."""
    record = examine(lambda x, seed, p: Fused.apply(x, seed, p, 1), reference, INPUTS, cases=30, rng="seed", grad=True)
    assert (record.failed_check, record.cause) == ("gradients", "mask-mismatch"), record.message
    honest = examine(lambda x, seed, p: Fused.apply(x, seed, p, 0), reference, INPUTS, cases=60, rng="seed", grad=True)
    assert honest.verdict == "pass", honest.message
    assert honest.checks["gradients"]["verdict"] == "pass", honest.checks["gradients"]


def normalised(y: T) -> T:
    return y / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt()


def after_dropout(x: T, seed: int, p: float) -> T:
    return normalised(dropout(x, seed, p))


HONEST: dict[str, tuple[Callable[..., T], Callable[..., T], dict[str, Any]]] = {
    "plain": (dropout, reference, {"rng": "seed"}),
    "with a residual and an activation": (
        lambda x, r, seed, p: dropout(torch.relu(x), seed, p) + r,
        lambda x, r, seed, p, mask: apply(torch.relu(x), mask, p) + r,
        {"rng": "seed", "inputs": {**INPUTS, "r": tensor("rows cols")}},
    ),
    "whole rows, by one draw each": (
        lambda x, seed, p: apply(x, uniform((*x.shape[:-1], 1), seed) >= p, p),
        lambda x, seed, p, keep: apply(x, keep, p),
        {"rng": rng("seed", mask="keep", dims="rows 1"), "dims": {"rows": dim(40, 90)}},
    ),
    "beside a mask that changes with the values": (
        lambda x, on, seed, p: dropout(x * on, seed, p),
        lambda x, on, seed, p, mask: apply(x * on, mask, p),
        {"rng": "seed", "inputs": {**INPUTS, "on": tensor("rows cols", dtype=torch.bool)}},
    ),
    "a probability to keep": (
        lambda x, seed, keep: dropout(x, seed, 1 - keep),
        lambda x, seed, keep, mask: apply(x, mask, 1 - keep),
        {
            "rng": rng("seed", p=lambda keep: 1 - keep),
            "inputs": {"x": tensor("rows cols"), "seed": SEEDS, "keep": st.sampled_from([0.9, 0.25])},
        },
    ),
    "eight random bits": (
        lambda x, seed, p: apply(x, (uniform(x.shape, seed) * 256).floor() >= int(p * 256), p),
        reference,
        {"rng": "seed"},
    ),
    "before a sum, seen by a function": (
        after_dropout,
        lambda x, seed, p, mask: normalised(apply(x, mask, p)),
        {"rng": rng("seed", recover=lambda x, seed, p: uniform(x.shape, seed) >= p)},
    ),
    "drawn by torch's generator": (
        lambda x: apply(x, torch.rand(x.shape) >= 0.25, 0.25),
        lambda x, mask: apply(x, mask, 0.25),
        {"rng": rng(p=0.25), "inputs": {"x": tensor("rows cols")}},
    ),
    "noise that the reference draws too": (
        lambda x, seed: x + uniform(x.shape, seed).to(x.dtype),
        lambda x, seed: x + uniform(x.shape, seed).to(x.dtype),
        {"rng": "seed", "inputs": {"x": tensor("rows cols"), "seed": SEEDS}},
    ),
    "a seed in a tensor": (
        lambda x, seed: dropout(x, int(seed), 0.5),
        lambda x, seed, mask: apply(x, mask, 0.5),
        {"rng": rng("seed", p=0.5), "inputs": {"x": tensor("rows cols"), "seed": tensor("", dtype=torch.int64)}},
    ),
}


@sweep("name", HONEST, fast=("drawn by torch's generator",))
def test_honest_random_numbers_pass(examine: Any, name: str) -> None:
    """Each draws in its own way and passes, with enough seen of its seeds for `repeat` to say so."""
    fused, right, keywords = HONEST[name]
    keywords = {"inputs": INPUTS, **keywords}
    record: TestRecord = examine(fused, right, cases=24, **keywords)
    assert record.verdict == "pass", record.message
    assert record.checks["repeat"]["verdict"] == "pass", record.checks["repeat"]


class _Dropout(torch.autograd.Function):
    """Right, or without the scale in backward."""

    @staticmethod
    def forward(ctx: Any, x: T, seed: int, p: float, scaled: bool) -> T:
        kept = uniform(x.shape, seed) >= p
        ctx.save_for_backward(kept)
        ctx.p = p if scaled else 0.0
        return apply(x, kept, p)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: T) -> Any:
        (kept,) = ctx.saved_tensors
        return apply(upstream, kept, ctx.p), None, None, None


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [True, False])
def test_zeros_of_narrowed_values_hide_no_mask(examine: Any, scaled: bool) -> None:
    """An element of 0 is 0 kept or dropped, and its gradient is not: other values show which of them it is."""

    def halves(shape: Any, dtype: torch.dtype, generator: torch.Generator) -> T:
        return torch.randn(shape, generator=generator).mul(2).round().div(2).relu().to(dtype)

    inputs = {"x": tensor("rows cols", values=halves), "seed": SEEDS, "p": st.sampled_from([0.1, 0.5])}
    fused = lambda x, seed, p: _Dropout.apply(x, seed, p, scaled)  # noqa: E731
    record = examine(fused, reference, inputs, rng=rng("seed", p="p"), grad="x", dtypes="float32", cases=25)
    assert record.verdict == ("pass" if scaled else "fail"), record.message
    assert scaled or record.failed_check == "gradients"


@pytest.mark.slow
def test_few_elements_leave_the_seed_unknown(examine: Any) -> None:
    """With never more than six elements equal masks are no news: unknown, not pass."""
    dims = {"rows": dim(0, 2), "cols": dim(0, 3)}
    record = examine(dropout, reference, INPUTS, cases=30, rng="seed", dims=dims)
    assert record.verdict == "pass"
    entry = record.checks["repeat"]
    assert (entry["verdict"], "whether the mask depends on the seed" in entry["reason"]) == ("unknown", True), entry


@pytest.mark.slow
def test_a_pass_says_what_it_would_have_found(examine: Any) -> None:
    """A share of kept elements that is off by as much as stated is found, and one off by a fifth of that is not."""
    dims = {"rows": dim(20, 20), "cols": dim(50, 50)}
    given = {"inputs": {**INPUTS, "p": st.just(0.5)}, "cases": 8, "rng": "seed", "dims": dims}
    honest = examine(dropout, reference, **given)
    found = honest.checks["repeat"]["would_find"]
    assert 0.05 < found["share"] < 0.2, found
    assert 0.25 < found["correlation"] < 0.5, found
    assert any("would show with 99 %" in note for note in honest.notes), honest.notes
    for off, verdict in ((found["share"], "fail"), (found["share"] / 5, "pass")):
        record = examine(lambda x, seed, p, off=off: apply(x, uniform(x.shape, seed) >= p - off, p), reference, **given)
        assert record.verdict == verdict, (off, record.message)


@pytest.mark.slow
def test_noise_that_no_seed_changes_fails(examine: Any) -> None:
    """Where nobody knows a mask, results that no seed changes in ten cases are a seed that is ignored."""
    inputs = {"x": tensor("rows cols"), "seed": SEEDS}
    record = examine(lambda x, seed: x * 1, lambda x, seed: x.clone(), inputs, cases=60, rng="seed")
    assert (record.failed_check, record.cause) == ("repeat", "seed-ignored"), record.message


@pytest.mark.slow
def test_a_generator_that_is_not_advanced_fails(examine: Any) -> None:
    """Two calls in a row with one mask, or seeds that change nothing, are found without a seed argument."""

    def constant(x: T) -> T:
        return apply(x, uniform(x.shape, 3) >= 0.25, 0.25)

    def put_back(x: T) -> T:
        with torch.random.fork_rng(devices=[]):
            return apply(x, torch.rand(x.shape) >= 0.25, 0.25)

    for fused, cause in ((constant, "seed-ignored"), (put_back, "repeated-mask")):
        inputs = {"x": tensor("rows cols")}
        record = examine(fused, lambda x, mask: apply(x, mask, 0.25), inputs, cases=30, rng=rng(p=0.25))
        assert (record.failed_check, record.cause) == ("repeat", cause), record.message


def test_a_hidden_mask_is_an_error_with_the_way_out(examine: Any) -> None:
    """Dropout before a sum over the row cannot be seen in the result; the message names `recover`."""
    with pytest.raises(SpecError, match=r"no output of the reference follows 'mask' element by element.*recover="):
        examine(after_dropout, lambda x, seed, p, mask: normalised(apply(x, mask, p)), INPUTS, cases=30, rng="seed")


@pytest.mark.slow
def test_a_kernel_that_raises_is_told_so(examine: Any) -> None:
    """A refusal is the kernel's own though no mask was seen; where the reference raises the same, there is none."""

    def fused(x: T, seed: int, p: float) -> T:
        if p == 1.0:
            raise ZeroDivisionError
        return dropout(x, seed, p)

    record = examine(fused, reference, INPUTS, cases=30, rng="seed")
    assert [one["code"] for one in record.findings] == ["refuses"], record.message

    def dividing(x: T, seed: int, p: float, mask: T) -> T:
        return torch.where(mask, x * (1 / (1 - p)), 0.0)

    refused = examine(fused, dividing, INPUTS, cases=30, rng="seed")
    assert (refused.verdict, list(refused.rejected)) == ("pass", ["reference ZeroDivisionError"]), refused.message
