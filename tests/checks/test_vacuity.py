"""Check ``vacuity``: a test in which a wrong answer passes everywhere fails itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fusion import values
from pytest_fusion.checks.vacuity import ENOUGH_CASES, Vacuity
from pytest_fusion.oracle.rounding import significand
from pytest_fusion.spec.inputs import tensor
from pytest_fusion.spec.promises import Tolerance

T = torch.Tensor


def double(x: T) -> T:
    return x * 2


VACUOUS: dict[str, Any] = {
    "zeros": ({"x": tensor("rows hidden", values=values.constant(0))}, double, {}),
    "constant": ({"x": tensor("rows hidden", values=values.constant(3))}, double, {}),
    "tolerance": (None, double, {"tolerance": Tolerance(atol=1e6)}),
    "previous": ({"x": tensor("4 4", values=values.constant(3))}, lambda x: x + torch.arange(4.0), {}),
}


@pytest.mark.parametrize("name", VACUOUS)
def test_a_test_that_cannot_fail_fails(examine: Any, name: str) -> None:
    """Inputs of zeros, of one value, a boundless tolerance and an answer that never changes prove nothing."""
    inputs, kernel, keywords = VACUOUS[name]
    plain = {} if inputs is None else {"inputs": inputs}
    if name == "tolerance":
        plain = {"inputs": {"x": tensor("rows hidden", values=values.normal())}}
    record = examine(kernel, kernel, cases=20, **plain, **keywords)
    assert (record.verdict, record.failed_check, record.cause) == ("fail", "vacuity", "vacuous-test")
    assert "proves nothing" in record.message


def test_an_ordinary_test_passes(examine: Any) -> None:
    """Generated values refute zeros, constants and old memory."""
    record = examine(double, double, cases=15)
    assert record.checks["vacuity"]["verdict"] == "pass"


def test_a_fixed_tolerance_that_hides_half_the_digits_is_a_hazard(examine: Any) -> None:
    """Under one per cent, the field's usual choice, a float32 kernel that computes in bfloat16 would pass."""
    inputs = {"x": tensor("rows hidden", values=values.normal())}
    record = examine(double, double, inputs, tolerance=Tolerance(rtol=1e-2, atol=1e-2), cases=15, dtypes=torch.float32)
    assert (record.verdict, record.checks["vacuity"]["verdict"]) == ("pass", "pass")
    assert [one["code"] for one in record.findings] == ["loose-tolerance"]
    assert "an output rounded to the next lower precision would have passed" in record.checks["vacuity"]["reason"]


def test_an_approximate_kernel_with_a_tolerance_of_its_own_is_not_vacuous() -> None:
    """Zeros are refuted and lower precision is not: `loose-tolerance`, and too few cases conclude nothing."""
    collector = Vacuity()
    for case in range(ENOUGH_CASES):
        right = torch.linspace(1, 2, 8) + case
        collector.observe("out", right, lambda wrong, right=right: bool(((wrong - right).abs() < 0.1).all()))
    verdict = collector.conclude(ENOUGH_CASES, fixed=True)
    assert (verdict.status, verdict.code, verdict.output) == ("hazard", "loose-tolerance", "out")
    assert collector.conclude(ENOUGH_CASES).status == "pass"
    assert collector.conclude(ENOUGH_CASES - 1, fixed=True).status == "unknown"


def test_a_fixed_tolerance_for_a_coarse_product_is_not_accused(examine: Any) -> None:
    """A tolerance of one per mille for TF32, under which float16 rounding passes too, is the user's to choose."""
    inputs = {"x": tensor("rows hidden", values=values.normal())}
    record = examine(double, double, inputs, tolerance=Tolerance(rtol=1e-3, atol=1e-3), cases=15, dtypes=torch.float32)
    assert record.verdict == "pass", record.message


def test_a_few_cases_are_unknown(examine: Any) -> None:
    """With fewer than five cases nothing is concluded."""
    record = examine(double, double, cases=ENOUGH_CASES - 2)
    assert record.checks["vacuity"]["verdict"] == "unknown"
    assert str(ENOUGH_CASES) in record.checks["vacuity"]["reason"]


def test_a_kernel_without_tensor_results_is_unknown(examine: Any) -> None:
    """A returned number is compared, but cannot be tried with wrong answers."""
    record = examine(lambda x: x.dim(), lambda x: x.dim(), cases=8)
    assert record.verdict == "pass", record.message
    assert record.checks["vacuity"]["verdict"] == "unknown"


def test_what_no_case_could_tell_is_not_held_against_the_test() -> None:
    """Empty outputs and single elements refute nothing; that is no evidence of a vacuous test."""
    collector = Vacuity()
    for _ in range(ENOUGH_CASES):
        collector.observe("out", torch.zeros(0), lambda wrong: True)
    assert collector.conclude(ENOUGH_CASES).status == "pass"
    single = Vacuity()
    for i in range(ENOUGH_CASES):
        single.observe("out", torch.tensor([i + 1.0]), lambda wrong, i=i: bool(wrong == i + 1))
    assert single.conclude(ENOUGH_CASES).status == "pass"


def test_one_refuting_case_is_enough() -> None:
    """A wrong answer that a single case of many refutes does not make the test vacuous."""
    collector = Vacuity()
    for i in range(9):
        collector.observe("out", torch.tensor([1.0, 2.0, 3.0]), lambda wrong, i=i: i != 4)
    assert collector.conclude(9).status == "pass"
    stubborn = Vacuity()
    for _ in range(9):
        stubborn.observe("out", torch.tensor([1.0, 2.0, 3.0]), lambda wrong: not bool((wrong == 0).all()))
    verdict = stubborn.conclude(9)
    assert verdict.facts["wrong"] in ("constant", "previous")


def test_rounding_keeps_the_bits_asked_for() -> None:
    """Eleven significant bits are float16's: rounding to them equals a round trip through float16."""
    v = torch.linspace(1, 2, 999)
    assert torch.equal(significand(v, 11), v.half().float())
