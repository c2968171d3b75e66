"""Sizes: which ones are tried, and how they are fitted to bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_fusion.case import sizes
from pytest_fusion.case.make import ImpossibleCase
from pytest_fusion.errors import SpecError
from pytest_fusion.spec.dims import Dim, dim


def is_admissible(size: int, bound: Dim, other: int) -> bool:
    step = other if bound.multiple_of == "other" else int(bound.multiple_of or 1)
    return bound.min <= size <= (bound.max or size) * (bound.max != 0) and (size % step if step else size) == 0


@st.composite
def bounds(draw: st.DrawFn) -> Dim:
    try:
        return dim(
            draw(st.integers(0, 40)),
            draw(st.none() | st.integers(0, 200)),
            multiple_of=draw(st.none() | st.integers(1, 16) | st.just("other")),
        )
    except SpecError:
        return dim()


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 400), bounds(), st.integers(0, 20))
def test_a_fitted_size_is_admissible(wanted: int, bound: Dim, other: int) -> None:
    """``fit`` gives a size within the bounds, or says that there is none, which trying all of them confirms."""
    admissible = [n for n in range(500) if is_admissible(n, bound, other)]
    try:
        size = sizes.fit(wanted, bound, {"other": other})
    except ImpossibleCase:
        assert not admissible
        return
    assert size in admissible
    if wanted in admissible:
        assert size == wanted


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 400), bounds(), st.integers(0, 20))
def test_a_fitted_size_is_zero_only_where_nothing_else_is_allowed(wanted: int, bound: Dim, other: int) -> None:
    """A wish for 1 or more is not answered with the empty tensor as long as another size exists."""
    try:
        size = sizes.fit(wanted, bound, {"other": other})
    except ImpossibleCase:
        return
    if size == 0:
        assert not any(is_admissible(n, bound, other) for n in range(1, 500))


def test_a_multiple_may_be_an_expression() -> None:
    """``multiple_of="2*kv"`` follows the size it names; a division by a size of zero makes the case impossible."""
    assert sizes.fit(20, Dim(multiple_of="2*kv"), {"kv": 3}) == 18
    with pytest.raises(ImpossibleCase, match="divides by a size of zero"):
        sizes.fit(20, Dim(multiple_of="8//kv"), {"kv": 0})


def test_the_classes_hold_zero_one_and_the_neighbours_of_the_kernels_blocks() -> None:
    """Zero and one are sizes like any other; a block of 64 brings 63, 64, 65, 129 and whole blocks."""
    plain = {size for found in sizes.classes(()).values() for size in found}
    assert {0, 1} <= plain
    around = {size for found in sizes.classes((64,)).values() for size in found}
    assert {63, 64, 65, 128, 129, 192} <= around


def test_a_dim_that_is_never_small_has_many_sizes_too() -> None:
    """Fitted to a least size of 64 every class would be 64; beyond it tails of up to 32 are what they are elsewhere."""
    bound = dim(64, 200)
    fitted = {label: sizes.of_class(found, bound) for label, found in sizes.classes((64,)).items()}
    assert fitted["power+1"] == (67, 69, 73, 81, 97)
    assert fitted["power"] == (66, 68, 72, 80, 96)
    assert fitted["one"] == (1,)
    assert sizes.fit(1, bound, {}) == 64
    assert fitted["block+1"] == (65,)
    assert sizes.of_class(sizes.CLASSES["power"], dim(2)) == sizes.CLASSES["power"]


def test_the_ladder_ascends_and_has_every_power_with_its_neighbours() -> None:
    """Shrinking walks the boundaries from 0 up."""
    ladder = list(sizes.LADDER)
    assert ladder == sorted(set(ladder))
    assert {0, 1, 15, 16, 17, 1023, 1024, 1025} <= set(ladder)
