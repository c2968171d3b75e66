"""A case in words."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from pytest_fusion.case.describe import describe
from pytest_fusion.case.model import Case, Layout, TensorCase
from pytest_fusion.spec.inputs import optional, tensor


def test_a_description_adds_shapes_and_strides_and_names_what_is_unusual(make_spec: Any) -> None:
    """Layouts, offsets, regimes, missing inputs and drawn values are told; what is plain is not."""
    spec = make_spec(
        {"x": tensor("rows 2*half"), "w": tensor("half"), "b": optional(tensor("")), "k": st.just((3, True))}
    )
    case = Case(
        {"rows": 3, "half": 4},
        "float16",
        {
            "x": TensorCase("float16", Layout("padded", 2, 0), "nan"),
            "w": TensorCase("float16"),
            "b": TensorCase("float16"),
        },
        absent=("b",),
        drawn={"k": (3, True)},
    )
    data = describe(spec, case)
    assert data["inputs"]["x"]["shape"] == [3, 8]
    assert data["inputs"]["x"]["strides"] == [11, 1]
    assert data["inputs"]["b"]["shape"] == []
    assert data["text"] == "half=4 rows=3; b None; w float16; x float16 padded offset 2 values nan; k=(3, True)"
    assert Case.from_json(data) == case
