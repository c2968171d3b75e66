"""Layouts that state their strides."""

from __future__ import annotations

import itertools

import pytest
import torch

from pytest_fusion.case import layouts, strided
from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.case.make import make_inputs
from pytest_fusion.case.stated import misfit
from pytest_fusion.run.placing import place
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor

CPU = torch.device("cpu")
VIEWS = [
    torch.empty(6, 10)[:, 2:7],
    torch.empty(6, 10).t(),
    torch.empty(4, 3, 8).transpose(0, 1),
    torch.empty(5, 8)[:, ::2],
    torch.empty(1, 8).expand(5, 8),
    torch.empty(4, 6, 8)[1:3, :, 2:5],
    torch.empty(2, 1, 8).as_strided((2, 1, 8), (8, 99, 1)),
    torch.empty(0, 7)[:, 1:4],
]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: str(view.stride()))
def test_the_kernel_gets_the_very_strides(view: torch.Tensor) -> None:
    """A tensor placed with stated strides has them, with the values it was made with."""
    spec = FusionSpec(fused=lambda x: x, reference=lambda x: x, inputs={"x": tensor(list(view.shape))})
    kind = strided.stated(view.stride())
    case = Case({}, "float32", {"x": TensorCase("float32", Layout(kind, 3))}, seed=5)

    assert misfit(spec, case) is None
    logical = make_inputs(spec, case, CPU)
    placed = place(logical, case, CPU, "nan").arguments["x"]

    assert placed.stride() == view.stride()
    assert placed.storage_offset() == 3
    assert torch.equal(placed, logical["x"])


@pytest.mark.parametrize("strides", [(1, 1), (0, 3), (2, 1), (4,), (4, 2, 1)])
def test_strides_that_do_not_fit_the_shape_are_contiguous(strides: tuple[int, ...]) -> None:
    """Where two elements would share a place, or the dimensions are others, the tensor is contiguous: sizes shrink."""
    plan = layouts.geometry((3, 4), Layout(strided.stated(strides)))

    if strides == (0, 3):
        assert plan.expanded == (0,)
    else:
        assert plan.strides == (4, 1)


def test_what_a_spec_excludes_is_no_case_of_it() -> None:
    """A spec of contiguous tensors takes contiguous strides and no others; one that draws columns takes columns."""
    case = Case({"m": 3, "n": 4}, "float32", {"x": TensorCase("float32", Layout("strides(8,1)"))})
    dense = case.with_tensor("x", layout=Layout("strides(4,1)"))

    def spec(layouts: list[str]) -> FusionSpec:
        inputs = {"x": tensor("m n", layouts=layouts)}
        return FusionSpec(fused=lambda x: x, reference=lambda x: x, inputs=inputs)

    assert misfit(spec(["contiguous"]), dense) is None
    assert "which none of the spec's layouts (contiguous) is" in str(misfit(spec(["contiguous"]), case))
    assert "which none of" in str(misfit(spec(["contiguous", "step"]), case))
    assert misfit(spec(["contiguous", "padded"]), case) is None


def test_every_layout_of_a_case_is_one_of_the_kinds_of_its_strides() -> None:
    """Strides are told apart as the layouts of a spec are: what a layout makes, its name covers."""
    shape = (3, 4, 5)
    for kind, variant in layouts.choices(
        ("contiguous", "padded", "transposed", "step", "unflattenable", "expanded"), 3
    ):
        strides = layouts.geometry(shape, Layout(kind, 0, variant)).strides
        found = strided.kinds(shape, strides)
        assert kind in found or (kind, found) == ("contiguous", ())


def test_the_text_says_the_strides() -> None:
    """Stated strides come back out of the text; other kinds state none, and only those of 0 repeat a slice."""
    for strides in itertools.product((0, 1, 70), repeat=2):
        assert strided.parse(strided.stated(strides)) == strides
        assert strided.repeats(strided.stated(strides)) is (0 in strides)
    assert strided.stated(()) == "contiguous"
    assert [strided.parse(text) for text in ("padded", "strides()", "strides(1,-2)")] == [None] * 3
    assert strided.repeats("expanded")
