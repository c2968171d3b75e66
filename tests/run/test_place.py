"""Logical inputs become guarded tensors in their layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.case.layouts import choices, geometry
from pytest_fusion.run.placing import laid_apart, place, renewed, rewrite
from pytest_fusion.spec.inputs import LAYOUTS

CPU = torch.device("cpu")
NOTHING = Case({}, "float32", {})


def with_layout(layout: Layout, dtype: str = "float32") -> Case:
    return Case({}, dtype, {"x": TensorCase(dtype, layout)})


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (3, 4), (2, 0), (2, 3, 4), (1, 3, 1)])
def test_a_placed_tensor_has_its_layout_and_its_values(shape: tuple[int, ...]) -> None:
    """In each layout that the shape admits, strides and offset are those asked for and the values are kept."""
    for kind, variant in choices(LAYOUTS, len(shape)):
        layout = Layout(kind, 3, variant)
        plan = geometry(shape, layout)
        values = torch.randn(tuple(1 if i in plan.expanded else n for i, n in enumerate(shape))).expand(shape)
        x = place({"x": values}, with_layout(layout), CPU, "nan").arguments["x"]
        assert torch.equal(x, values)
        assert (x.stride(), x.storage_offset()) == (plan.strides, plan.offset)
        assert not x.requires_grad


@pytest.mark.parametrize("dtype", "float16 bfloat16 float8_e4m3fn int8 int64 uint16 bool complex64 complex128".split())
def test_every_dtype_can_be_placed(dtype: str) -> None:
    """Elements of one to sixteen bytes keep their bits between rows of padding."""
    values = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(getattr(torch, dtype))
    placed = place({"x": values}, with_layout(Layout("padded"), dtype), CPU, "huge")
    x = placed.arguments["x"]
    assert x.dtype == values.dtype
    assert x.tolist() == values.tolist()
    assert placed.arena.damage() == []


def test_the_caller_s_own_tensor_keeps_its_strides() -> None:
    """A constant that is transposed, sliced or expanded lies in memory as it did; its copy is the kernel's own."""
    base = torch.arange(24.0).reshape(4, 6)
    for value in (base.T, base[1:, ::2], base[:, 1].expand(3, 4), base[2], base[:0], base[1, 1]):
        x = place({"x": value}, NOTHING, CPU, "nan").arguments["x"]
        assert x.stride() == value.stride()
        assert torch.equal(x, value)
        assert x.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()


def test_values_that_differ_along_an_expanded_axis_are_laid_apart() -> None:
    """One slice has a place there; the values of an experiment may be others than that, NaN in one place are alike."""
    case = with_layout(Layout("expanded", 0, 1))
    same = torch.tensor([[1.0, 1.0], [float("nan"), float("nan")]])
    assert laid_apart(case, {"x": same}) == case
    assert laid_apart(case, {"x": same[:, :0]}) == case
    apart = laid_apart(case, {"x": torch.tensor([[1.0, 1.0], [2.0, 3.0]])})
    assert apart.tensors["x"].layout == Layout()


def test_a_sliding_window_becomes_contiguous() -> None:
    """Overlapping elements cannot be copied one by one, so such a constant is laid out anew."""
    windows = torch.arange(6.0).unfold(0, 3, 1)
    x = place({"x": windows}, NOTHING, CPU, "nan").arguments["x"]
    assert torch.equal(x, windows)
    assert x.is_contiguous()


def test_an_offset_keeps_its_alignment() -> None:
    """A view 1001 elements into its buffer is placed at the same remainder, without the buffer."""
    value = torch.arange(2000.0)[1001:1005]
    x = place({"x": value}, NOTHING, CPU, "nan").arguments["x"]
    assert x.data_ptr() % 16 == 1001 * 4 % 16
    assert x.untyped_storage().nbytes() < 2000 * 4


def test_nested_tensors_are_placed_under_their_index() -> None:
    """The tensors of a list and of a dict are guarded one by one; numbers pass through."""
    value: dict[str, Any] = {"a": [torch.ones(2), 3], "b": torch.zeros(1)}
    placed = place({"x": value}, NOTHING, CPU, "nan")
    assert set(placed.tensors) == {"x[0]", "x[1]"}
    placed.arguments["x"]["a"][0][0] = 5
    assert value["a"][0].tolist() == [1, 1]
    assert placed.arguments["x"]["a"][1] == 3


def test_rewriting_puts_new_values_at_the_same_addresses() -> None:
    """Lone, nested and expanded tensors are overwritten in place, whatever the kernel did to them."""
    logical = {"x": torch.ones(3, 4), "y": [torch.ones(2)]}
    placed = place(logical, with_layout(Layout("expanded")), CPU, "nan")
    x, y = placed.arguments["x"], placed.arguments["y"][0]
    rewrite(placed, {"x": torch.full((3, 4), 7.0), "y": [torch.full((2,), 8.0)]})
    assert x.unique().tolist() == [7]
    assert y.tolist() == [8, 8]
    assert placed.arena.damage() == []


def test_renewed_tensors_look_like_the_ones_that_are_gone() -> None:
    """Address, strides and version are those of the old objects, the values the new ones."""
    case = with_layout(Layout("padded"))
    placed = place({"x": torch.ones(2, 3), "n": 4, "rest": [torch.zeros(2)]}, case, CPU, "nan")
    old = {name: (t.data_ptr(), t.stride(), t._version) for name, t in placed.tensors.items()}
    numbers = {name: id(t) for name, t in placed.tensors.items()}
    placed.arguments.clear()
    placed.tensors.clear()
    values = {"x": torch.full((2, 3), 7.0), "n": 4, "rest": [torch.ones(2)]}
    fresh = renewed(placed.arena, numbers, values)
    assert {name: (t.data_ptr(), t.stride(), t._version) for name, t in fresh.tensors.items()} == old
    assert fresh.arguments["x"].tolist() == [[7.0] * 3] * 2
    assert fresh.arguments["n"] == 4
    assert fresh.arguments["rest"][0].tolist() == [1.0, 1.0]


def test_rewriting_renews_what_is_no_tensor() -> None:
    """A number that follows from the values, such as a longest length, is the new one beside the new values."""
    placed = place({"x": torch.ones(2), "longest": 3, "rest": [torch.zeros(1), 4]}, NOTHING, CPU, "nan")
    address = placed.arguments["rest"][0].data_ptr()
    rewrite(placed, {"x": torch.zeros(2), "longest": 5, "rest": [torch.ones(1), 6]})
    assert placed.arguments["longest"] == 5
    assert placed.arguments["rest"][1] == 6
    assert placed.arguments["rest"][0].data_ptr() == address
