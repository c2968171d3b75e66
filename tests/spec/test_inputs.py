"""Input specs: how what a user writes is understood."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from pytest_fusion import values
from pytest_fusion.errors import SpecError
from pytest_fusion.spec.inputs import (
    LAYOUTS,
    ConstantSpec,
    OptionalSpec,
    StrategySpec,
    TensorSpec,
    as_input,
    derived,
    optional,
    tensor,
    unwrap,
)


def test_what_is_neither_a_spec_nor_a_strategy_is_a_constant() -> None:
    """A number, a list and a tensor are constants; a Hypothesis strategy is drawn."""
    assert isinstance(as_input(1e-6), ConstantSpec)
    assert isinstance(as_input([1, 2]), ConstantSpec)
    assert isinstance(as_input(torch.ones(2)), ConstantSpec)
    assert isinstance(as_input(st.integers(0, 3)), StrategySpec)
    assert isinstance(as_input(st.integers(0, 3).map(str)), StrategySpec)


@pytest.mark.parametrize(
    "value", [[tensor("a"), tensor("b")], (1, st.integers()), {"x": [optional(tensor("a"))]}, [derived(lambda a: a)]]
)
def test_a_list_of_inputs_is_refused(value: object) -> None:
    """Its tensors would not be drawn, and the kernel would get their descriptions."""
    with pytest.raises(SpecError, match=r"input 'parts' is a \w+ that holds tensor.*Name each one"):
        as_input(value, "parts")


def test_an_optional_holds_any_input() -> None:
    """``optional`` wraps tensors and constants alike, once."""
    assert isinstance(unwrap(optional(tensor("n"))), TensorSpec)
    assert isinstance(unwrap(optional(3.0)), ConstantSpec)
    with pytest.raises(SpecError, match="one optional is enough"):
        optional(optional(tensor("n")))
    assert isinstance(as_input(optional(tensor("_")), "x"), OptionalSpec)


def test_dims_may_be_a_string_a_number_or_a_sequence() -> None:
    """The three ways to write a shape mean the same."""
    assert tensor(4).shape.evaluate({}) == (4,)
    assert tensor(("rows", "2*half")).shape.terms == tensor("rows 2*half").shape.terms


def test_a_tensor_without_dtype_follows_the_case() -> None:
    """``dtype=None`` follows the case's dtype, anything else fixes its own."""
    assert tensor("n").follows_case_dtype
    assert tensor("n", dtype=[torch.int32, torch.int64]).dtypes == ("int32", "int64")
    assert tensor("n").may_float()
    assert not tensor("n", dtype=torch.int64).may_float()
    assert tensor("n", dtype=[torch.int8, torch.float16]).may_float()


def test_layouts_default_to_all_and_a_wrong_one_is_named() -> None:
    """Every layout may be drawn unless ``layouts`` narrows them; a typing error names the nearest."""
    assert tensor("n").layouts == LAYOUTS
    assert tensor("n", layouts="step").layouts == ("step",)
    with pytest.raises(SpecError, match="did you mean 'transposed'"):
        tensor("n m", layouts=["transpose"])
    with pytest.raises(SpecError, match="unknown layout None; known: contiguous"):
        tensor("n", layouts=[None])
    with pytest.raises(SpecError, match="leaves no layout"):
        tensor("n", layouts=())


def test_values_are_a_profile_or_a_function() -> None:
    """A number as ``values`` is refused with both ways to say it."""
    with pytest.raises(SpecError, match=r"profile of pytest_fusion\.values nor a function"):
        tensor("n", values=3)
    with pytest.raises(SpecError, match=r"values=values\.normal is the function that makes a profile; call it"):
        tensor("n", values=values.normal)
    with pytest.raises(SpecError, match="expected profiles such as"):
        values.one_of(1, 2)
    with pytest.raises(SpecError, match=r"values\.normal\): that is the function that makes a profile; call it"):
        values.one_of(values.constant(1), values.normal)
    with pytest.raises(SpecError, match="expected profiles such as"):
        values.one_of([values.normal(), torch.ones(2)])


def test_a_derived_input_needs_what_its_parameters_name() -> None:
    """The parameter names are the needs, keyword-only ones too; a builtin without a signature says how to wrap it."""
    found = derived(lambda x, hidden=1, *, generator: x)
    assert (found.needs, found.required) == (("x", "hidden", "generator"), ("x", "generator"))
    with pytest.raises(SpecError, match="expected a function"):
        derived(3)
    with pytest.raises(SpecError, match="wrap it: derived"):
        derived(torch.arange)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: values.normal(std=-1), "std"),
        (lambda: values.uniform(2, 1), "below the lower"),
        (lambda: values.positive(0), "more than 0"),
        (lambda: values.integers(3, 1), "integers.3, 1.: the upper"),
        (lambda: values.booleans(2), "0 to 1"),
        (values.one_of, "at least one"),
    ],
)
def test_a_profile_without_values_is_refused(make: object, part: str) -> None:
    """Bounds that hold no value raise when the profile is written."""
    with pytest.raises(SpecError, match=part):
        make()  # type: ignore[operator]
