"""Sampled outputs against the reference's probabilities: single draws, frequencies, rows that share their numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from pytest_fusion import dim, values
from pytest_fusion.case import counter_random
from pytest_fusion.checks.randomness import distribution
from pytest_fusion.errors import SpecError
from pytest_fusion.report.record import TestRecord
from pytest_fusion.spec.inputs import tensor
from tests.sweeps import sweep

T = torch.Tensor
INPUTS = {
    "logits": tensor("rows vocab", values=values.normal()),
    "seed": st.integers(0, 2**31 - 1),
}
DIMS = {"rows": dim(0, 60), "vocab": dim(1, 60)}


@pytest.fixture(autouse=True)
def _any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit bounds the draws of a case, so results would depend on the machine: no limit here."""
    monkeypatch.setattr(distribution, "_SECONDS", math.inf)
    monkeypatch.setattr(distribution, "_FAST_S", math.inf)


def uniform(shape: tuple[int, ...], seed: int) -> T:
    return counter_random.uniform(shape, counter_random.mix(seed), "cpu")


def probabilities(logits: T, seed: int) -> T:
    """The upper half of each row."""
    scores = logits.float()
    cut = scores.topk((scores.shape[-1] + 1) // 2, -1).values[:, -1:]
    return torch.softmax(torch.where(scores >= cut, scores, -torch.inf), -1)


def inverse(p: T, places: T) -> T:
    """Inversion of the cumulated probabilities."""
    last = (p > 0).long().cumsum(-1).argmax(-1)
    return torch.minimum((p.double().cumsum(-1) <= places[:, None]).sum(-1), last)


def drawn(logits: T, seed: int) -> T:
    return inverse(probabilities(logits, seed), uniform((len(logits),), seed))


def gumbel(logits: T, seed: int) -> T:
    noise = -torch.log(-torch.log(uniform(tuple(logits.shape), seed).clamp_min(1e-30)))
    return (probabilities(logits, seed).log() + noise).argmax(-1).int()


def moved(p: T, share: float, key: T) -> T:
    """Each row's probabilities with ``share`` moved from the half of it where ``key`` is largest to the other half."""
    order = key.argsort(-1, descending=True)
    own = p.gather(-1, order)
    upper = ((0.5 - (own.cumsum(-1) - own)) / own.clamp_min(1e-30)).clamp(0, 1)
    own = own * (1 + 2 * share * (1 - 2 * upper))
    return torch.zeros_like(own).scatter(-1, order, own)


def plain(logits: T, seed: int) -> T:
    return torch.softmax(logits.float(), -1)


def beside(logits: T, other: T, seed: int) -> T:
    return plain(logits, seed)


def pulled(logits: T, other: T, seed: int) -> T:
    """A draw that follows another input a little: a twentieth of each row is moved by it."""
    return inverse(moved(plain(logits, seed), 0.05, other), uniform((len(logits),), seed))


def untouched(logits: T, other: T, seed: int) -> T:
    return inverse(plain(logits, seed), uniform((len(logits),), seed))


def uniform_draw(logits: T, seed: int) -> T:
    return inverse(plain(logits, seed), uniform((len(logits),), seed))


PLANTED: dict[str, tuple[Callable[[T, int], T], str, str | None, str]] = {
    "another temperature": (
        lambda logits, seed: inverse(probabilities(logits * 1.5, seed), uniform((len(logits),), seed)),
        "values",
        "biased-sampling",
        "do not follow the reference's probabilities",
    ),
    "all of the row": (
        lambda logits, seed: inverse(torch.softmax(logits.float(), -1), uniform((len(logits),), seed)),
        "values",
        "biased-sampling",
        "have probability 0",
    ),
    "past the end": (
        lambda logits, seed: drawn(logits, seed) + (uniform((len(logits),), seed) > 0.9) * logits.shape[-1],
        "values",
        "biased-sampling",
        "outside the vocabulary",
    ),
    "rows share their number": (
        lambda logits, seed: inverse(probabilities(logits, seed), uniform((1,), seed).expand(len(logits))),
        "values",
        "biased-sampling",
        "rows share their random numbers",
    ),
    "the seed is ignored": (lambda logits, seed: drawn(logits, 5), "repeat", "seed-ignored", "draw the same out"),
    "the seed is a byte": (lambda logits, seed: drawn(logits, seed & 0xFF), "repeat", "seed-ignored", "in bit"),
    "a neighbour's numbers": (
        lambda logits, seed: inverse(
            probabilities(logits, seed),
            torch.where(
                uniform((len(logits),), seed * 2) < 0.5,
                uniform((len(logits),), seed * 2 + 1),
                uniform((len(logits),), seed * 2 - 1),
            ),
        ),
        "values",
        "biased-sampling",
        "drawn alike between calls",
    ),
    "one draw for all": (lambda logits, seed: drawn(logits, seed)[:1], "structure", None, "one draw for each row"),
    "probabilities": (lambda logits, seed: drawn(logits, seed).float(), "structure", None, "has dtype torch.float32"),
}


@sweep("name", PLANTED, fast={"all of the row", "past the end", "one draw for all", "probabilities"})
def test_wrong_draws_fail(examine: Any, name: str) -> None:
    """Each is caught, by a single draw where that is enough, else by all of them together."""
    fused, check, cause, words = PLANTED[name]
    record: TestRecord = examine(fused, probabilities, INPUTS, cases=40, rng="seed", distribution=True, dims=DIMS)
    assert (record.verdict, record.failed_check) == ("fail", check), record.message
    assert words in record.message
    assert cause is None or record.cause == cause


# In the fast run at some 4 s: the one honest sampler there, and a verdict needs thousands of draws.
@sweep("fused", [drawn, gumbel])
def test_honest_draws_pass(examine: Any, fused: Callable[[T, int], T]) -> None:
    """By inversion or by noise, in any integer type, with enough draws for `values` to say so."""
    record = examine(fused, probabilities, INPUTS, cases=60, rng="seed", distribution=True, dims=DIMS)
    assert record.verdict == "pass", record.message
    assert record.checks["values"]["verdict"] == "pass", record.checks["values"]


@pytest.mark.slow
def test_what_another_input_decides_is_found(examine: Any) -> None:
    """A twentieth of each row that follows another input shows in the order by that input, and without it nothing."""
    inputs = {**INPUTS, "other": tensor("rows vocab", values=values.normal())}
    more = {"cases": 30, "rng": "seed", "distribution": True, "dims": DIMS}
    record = examine(pulled, beside, inputs, **more)
    assert (record.verdict, record.cause) == ("fail", "biased-sampling"), record.message
    assert "by falling other" in record.message
    record = examine(untouched, beside, inputs, **more)
    assert record.verdict == "pass", record.message


@pytest.mark.slow
def test_a_pass_says_what_it_would_have_found(examine: Any) -> None:
    """The evidence is in the JSON and in one sentence, and more rows in a call find less."""
    shares = []
    for rows in (8, 60):
        dims = {"rows": dim(0, rows), "vocab": dim(2, 20)}
        record = examine(drawn, probabilities, INPUTS, cases=30, rng="seed", distribution=True, dims=dims)
        found = record.checks["values"]["would_find"]
        assert set(found) == {"one row", "every row", "between rows", "between calls"}
        assert 0 < found["every row"] < found["one row"] < 0.5
        assert any("would find with 99 %" in note for note in record.notes), record.notes
        shares.append((found["one row"], found["every row"], found["between rows"]))
    assert all(wide < narrow for narrow, wide in zip(*shares, strict=True)), shares


@pytest.mark.slow
def test_a_percent_of_one_row_is_within_reach(examine: Any) -> None:
    """Where rows have no bound, the default number of calls finds 1.1 % of one row's mass, or of every row's."""
    dims = {"rows": dim(0), "vocab": dim(2, 16)}
    record = examine(drawn, probabilities, INPUTS, cases=30, rng="seed", distribution=True, dims=dims)
    found = record.checks["values"]["would_find"]
    assert max(found["one row"], found["every row"]) <= 0.011, found


@pytest.mark.slow
def test_the_stated_deviation_is_found_about_as_often_as_stated(examine: Any) -> None:
    """Of three kernels that move the stated share of every row at most one passes; `test_frequencies` has the rate."""
    given = {"cases": 12, "rng": "seed", "distribution": True, "dims": {"rows": dim(0, 60), "vocab": dim(16, 20)}}
    stated = examine(uniform_draw, plain, INPUTS, **given).checks["values"]["would_find"]["every row"]

    def fused(logits: T, seed: int) -> T:
        p = plain(logits, seed)
        return inverse(moved(p, stated, p), uniform((len(logits),), seed))

    verdicts = [examine(fused, plain, INPUTS, seed=seed, **given).verdict for seed in range(3)]
    assert verdicts.count("fail") >= 2, verdicts


@pytest.mark.slow
def test_other_outputs_are_compared_as_ever(examine: Any) -> None:
    """Of a draw and its logarithm's table, the table is judged element by element."""

    def both(logits: T, seed: int) -> tuple[T, T]:
        return drawn(logits, seed), torch.logsumexp(logits, -1)

    def right(logits: T, seed: int) -> tuple[T, T]:
        return probabilities(logits, seed), torch.logsumexp(logits, -1)

    def wrong(logits: T, seed: int) -> tuple[T, T]:
        return drawn(logits, seed), torch.logsumexp(logits, -1) * 1.01

    record = examine(both, right, INPUTS, cases=30, rng="seed", distribution="out[0]", dims=DIMS)
    assert record.verdict == "pass", record.message
    record = examine(wrong, right, INPUTS, cases=30, rng="seed", distribution="out[0]", dims=DIMS)
    assert (record.failed_check, "out[1]" in record.message) == ("values", True), record.message


def test_few_draws_say_nothing(examine: Any) -> None:
    """A vocabulary of one has nothing to draw: unknown, not pass."""
    dims = {**DIMS, "vocab": dim(1, 1)}
    record = examine(drawn, probabilities, INPUTS, cases=20, rng="seed", distribution=True, dims=dims)
    entry = record.checks["values"]
    assert (record.verdict, entry["verdict"]) == ("pass", "unknown")
    assert "are too few to judge a distribution; 400 are needed" in entry["reason"]
    assert "allow more rows in dims=" in entry["reason"]
    assert not any("would find" in note for note in record.notes)


def test_an_output_that_is_not_there_is_an_error(examine: Any) -> None:
    """The message names the outputs that there are."""
    with pytest.raises(SpecError, match=r"distribution='tokens' names no output of the reference.*out"):
        examine(
            lambda logits, seed: logits[:, 0].clone(),
            lambda logits, seed: logits[:, 0].clone(),
            INPUTS,
            rng="seed",
            distribution="tokens",
            dims=DIMS,
        )
