"""Checks ``inputs``, ``bounds`` and ``unwritten``: who wrote where, and what the result depends on."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.checks.memory import check_damage, check_inputs, check_unwritten
from pytest_fusion.diagnosis.causes import likely_cause
from pytest_fusion.run.memory.damage import Change, Damage
from pytest_fusion.spec.inputs import tensor

T = torch.Tensor
PADDED = Case({"rows": 5, "hidden": 7}, "float32", {"x": TensorCase("float32", Layout("padded"))}, seed=1)


def double(x: T) -> T:
    return x * 2


def poke(t: T, element: int) -> None:
    """Write four bytes at an element of the storage, counted from the tensor's first."""
    ctypes.memset(t.data_ptr() + 4 * element, 1, 4)


def test_a_changed_input_fails_and_names_the_first_element(judge_one: Any) -> None:
    """A kernel that writes its input fails ``inputs``, also where the value written is the one that was there."""

    def fused(x: T) -> T:
        x[3, 2] = 0
        return x * 2

    def reference(x: T) -> T:
        y = x * 2
        y[3, 2] = 0
        return y

    failure = judge_one(fused, reference).failure
    assert (failure.check, failure.identity) == ("inputs", "inputs:x")
    assert failure.facts["first"] == [3, 2]
    assert "mutates='x'" in failure.reason


@pytest.mark.parametrize("keyword", ["mutates", "clobbers"])
def test_a_declared_write_passes(judge_one: Any, keyword: str) -> None:
    """``mutates`` and ``clobbers`` allow the write; the first compares what was written."""

    def fused(x: T) -> T:
        y = x * 2
        x.copy_(y)
        return y

    assert judge_one(fused, fused, again=True, **{keyword: "x"}).failure is None
    wrong = judge_one(lambda x: (x.mul_(3), None)[1], lambda x: (x.mul_(2), None)[1], mutates="x").failure
    assert wrong.check == "values"
    assert "x (in place)" in wrong.reason


def test_a_nested_input_is_watched_under_its_index(judge_one: Any) -> None:
    """The second tensor of a list is an input like any other."""
    inputs = {"pair": [torch.ones(3), torch.ones(3)]}
    failure = judge_one(
        lambda pair: pair[1].zero_() + pair[0] + 1, lambda pair: pair[0] + 1, inputs, case=Case({}, "float32", {})
    ).failure
    assert failure.identity == "inputs:pair[1]"


@pytest.mark.parametrize(
    ("element", "zone"),
    [(-1, "before"), (5 * 10 - 3, "after"), (7, "between")],
)
def test_a_write_outside_the_elements_fails_by_zone(judge_one: Any, element: int, zone: str) -> None:
    """One element before, behind or between the rows of a padded matrix is found and named."""

    def fused(x: T) -> T:
        poke(x, element)
        return x * 2

    result = judge_one(fused, double, case=PADDED)
    assert result.failure.check == "bounds"
    assert result.failure.facts["zone"] == zone
    assert result.failure.facts["elements"] in (1, -1)
    assert likely_cause(result.failure) == "out-of-bounds"


def test_a_write_outside_an_output_fails(judge_one: Any) -> None:
    """Memory that the kernel allocated itself is guarded too."""

    def fused(x: T) -> T:
        y = torch.empty_like(x)
        y.copy_(x * 2)
        poke(y, y.numel())
        return y

    failure = judge_one(fused, double).failure
    assert failure.identity == "bounds:write:after"


def test_a_result_that_depends_on_the_gaps_fails(judge_one: Any) -> None:
    """A kernel that ignores strides reads the padding, whose content then shows in the result."""

    def fused(x: T) -> T:
        return x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset()) * 2

    result = judge_one(fused, double, case=PADDED)
    assert result.failure.identity == "bounds:surroundings"
    assert judge_one(fused, double).failure is None


def test_an_unwritten_element_fails(judge_one: Any) -> None:
    """A result whose last column nothing stores is caught, though memory might hold the right numbers."""

    def fused(x: T) -> T:
        y = torch.empty_like(x)
        y[:, :-1] = 2 * x[:, :-1]
        return y

    failure = judge_one(fused, double).failure
    assert (failure.check, failure.facts["count"], failure.facts["first"]) == ("unwritten", 5, [0, 6])


def test_a_result_that_depends_on_fresh_memory_fails(judge_one: Any) -> None:
    """An accumulator that is never set to zero fails ``unwritten`` as scratch."""

    def fused(x: T) -> T:
        scratch = torch.empty(x.shape[1])
        scratch[:-1] = 0
        return x * 2 + scratch

    failure = judge_one(fused, double).failure
    assert failure.identity == "unwritten:scratch"


def test_an_honest_kernel_passes_in_every_layout(examine: Any) -> None:
    """Allocating empty, writing all, reading by strides: nothing to find on any case."""

    def fused(x: T, bias: T) -> T:
        y = torch.empty(x.shape, dtype=x.dtype)
        torch.mul(x, 2, out=y)
        return y.add_(bias)

    def reference(x: T, bias: T) -> T:
        return x * 2 + bias

    record = examine(fused, reference, {"x": tensor("*batch hidden"), "bias": tensor("hidden")}, cases=25)
    assert record.verdict == "pass", record.message
    assert {record.checks[name]["verdict"] for name in ("inputs", "bounds", "unwritten", "repeat")} == {"pass"}


def test_checks_that_no_case_reached_are_unknown(examine: Any) -> None:
    """After a failure of ``error`` on the first case nothing is known of memory."""

    def fused(x: T) -> T:
        raise RuntimeError

    record = examine(fused, double, cases=3)
    assert {record.checks[name]["verdict"] for name in ("inputs", "bounds", "unwritten")} == {"unknown"}


def test_a_check_that_is_switched_off_is_unknown_with_the_reason(examine: Any) -> None:
    """``without`` keeps the reason and does not fail the test."""

    def fused(x: T) -> T:
        if x.numel():
            x.view(-1)[0] = 0 if x.is_contiguous() else x.view(-1)[0]
        return x * 0

    record = examine(
        fused,
        lambda x: x * 0,
        without={"inputs": "known", "vacuity": "zeros are meant"},
        cases=6,
        inputs={"x": tensor("n", layouts="contiguous", values=lambda s, d, g: torch.ones(s, dtype=d))},
    )
    assert record.checks["inputs"]["verdict"] == "unknown"
    assert "known" in record.checks["inputs"]["reason"]
    assert record.verdict == "pass", record.message


def test_the_verdicts_on_facts() -> None:
    """No change, no damage and no mask pass; a tolerated change passes; anything else fails."""
    assert check_inputs([], ()).status == "pass"
    assert check_inputs([Change("x[1]", 1, (0,))], ["x"]).status == "pass"
    assert check_inputs([Change("x", 1, (0,))], ["y"]).failed
    assert check_damage([]).status == "pass"
    assert "2 element(s) away" in check_damage([Damage("x", "after", 2, 2, 8)]).reason
    assert "1 to 3 element(s) away" in check_damage([Damage("x", "after", 1, 3, 6)]).reason
    assert check_unwritten({"out": None, "b": torch.zeros(2, dtype=torch.bool)}).status == "pass"
    assert check_unwritten({"out": torch.tensor([False, True])}).facts["first"] == [1]
