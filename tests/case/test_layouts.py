"""Layouts: where the elements lie."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_fusion.case import layouts
from pytest_fusion.case.case_model import Layout
from pytest_fusion.spec.inputs import LAYOUTS

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
KINDS = st.sampled_from([kind for kind in LAYOUTS if kind != "offset"])


def addresses(plan: layouts.Geometry) -> list[int]:
    return [
        plan.offset + sum(i * stride for i, stride in zip(index, plan.strides, strict=True))
        for index in itertools.product(*map(range, plan.shape))
    ]


@settings(max_examples=300, deadline=None)
@given(SHAPES, KINDS, st.integers(0, 2), st.integers(0, 7))
def test_elements_lie_inside_the_storage_and_apart(
    shape: tuple[int, ...], kind: str, variant: int, offset: int
) -> None:
    """Each element has its own place in the storage, but for the axes that the layout expands."""
    plan = layouts.geometry(shape, Layout(kind, offset, variant))
    found = addresses(plan)
    assert plan.shape == shape
    assert all(0 <= address < plan.storage for address in found)
    distinct = math.prod(1 if axis in plan.expanded else size for axis, size in enumerate(shape)) if found else 0
    assert len(set(found)) == distinct
    assert plan.offset >= offset


@settings(max_examples=200, deadline=None)
@given(SHAPES, KINDS, st.integers(0, 2))
def test_only_expanded_repeats_elements(shape: tuple[int, ...], kind: str, variant: int) -> None:
    """Every other layout has a place for each element."""
    assert kind == "expanded" or not layouts.geometry(shape, Layout(kind, 0, variant)).expanded


@pytest.mark.parametrize(
    ("kind", "variant", "shape", "strides"),
    [
        ("contiguous", 0, (2, 3, 4), (12, 4, 1)),
        ("contiguous", 1, (2, 1, 4), (4, 14, 1)),
        ("padded", 0, (2, 3), (6, 1)),
        ("padded", 1, (2, 3), (6, 1)),
        ("transposed", 0, (2, 3, 4), (12, 1, 3)),
        ("transposed", 1, (2, 3, 4), (1, 2, 6)),
        ("step", 0, (2, 3), (6, 2)),
        ("unflattenable", 0, (2, 3, 4), (4, 8, 1)),
        ("unflattenable", 1, (2, 3, 4), (16, 4, 1)),
        ("expanded", 0, (2, 3), (0, 1)),
        ("expanded", 1, (2, 3), (1, 0)),
    ],
)
def test_a_layout_has_the_strides_it_is_named_after(
    kind: str, variant: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """The strides, counted by hand."""
    assert layouts.geometry(shape, Layout(kind, 0, variant)).strides == strides


@pytest.mark.parametrize("ndim", range(5))
def test_every_offered_variant_of_a_layout_is_a_different_one(ndim: int) -> None:
    """With no size of 1 in the way, no two pairs of kind and variant give the same places, but for odd strides."""
    shape = (3, 4, 5, 6)[:ndim]
    seen = {}
    for kind, variant in layouts.choices(LAYOUTS, ndim):
        plan = layouts.geometry(shape, Layout(kind, 0, variant))
        if (kind, variant) != ("contiguous", 1):
            assert (plan.strides, plan.offset) not in seen, (kind, variant, seen)
            seen[plan.strides, plan.offset] = kind
    assert seen


def test_a_tensor_that_may_only_be_what_it_cannot_be_is_contiguous() -> None:
    """A transposed vector does not exist, so the vector is contiguous."""
    assert layouts.choices(("transposed",), 1) == [("contiguous", 0)]
    assert layouts.geometry((5,), Layout("transposed")).strides == (1,)


def test_a_padded_tensor_has_room_of_its_own_on_both_sides() -> None:
    """A padded vector is an interior slice: one element before it and two behind it belong to its storage."""
    plan = layouts.geometry((4,), Layout("padded"))
    assert (plan.offset, plan.storage) == (1, 7)


@settings(max_examples=300, deadline=None)
@given(SHAPES.filter(len), KINDS, st.integers(0, 2), st.data())
def test_fewer_slices_are_no_plainer_than_all(
    shape: tuple[int, ...], kind: str, variant: int, data: st.DataObject
) -> None:
    """They have places of their own, contiguous ones stay so, and no stride of transposed ones becomes 1."""
    axis = data.draw(st.integers(0, len(shape) - 1))
    size = data.draw(st.integers(0, shape[axis]))
    new = (*shape[:axis], size, *shape[axis + 1 :])
    layout = Layout(kind, 0, variant)
    whole, fewer = layouts.geometry(shape, layout), layouts.geometry(new, layouts.of_fewer(shape, layout, axis, size))

    if kind != "expanded":
        assert len(set(addresses(fewer))) == math.prod(new)
    if kind == "contiguous":
        assert torch.empty_strided(new, fewer.strides).is_contiguous()
    if kind == "transposed":
        units = [[i for i, stride in enumerate(plan.strides) if stride == 1] for plan in (whole, fewer)]
        assert units[0] == units[1]


def test_one_row_of_a_transposed_tensor_is_a_view_of_it() -> None:
    """And one of a contiguous tensor, some axes of which have odd strides, has the stride of a row."""
    assert layouts.of_fewer((3, 9), Layout("transposed", 2), 0, 1) == Layout("strides(1,3)", 2)
    assert layouts.of_fewer((3, 9), Layout("contiguous", 2, 1), 0, 1) == Layout("strides(9,1)", 2)
    assert layouts.of_fewer((3, 9), Layout("transposed"), 0, 4) == Layout("transposed")
