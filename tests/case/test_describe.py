"""A case in words."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.case.describe import describe, unseen_values
from pytest_fusion.spec import values
from pytest_fusion.spec.inputs import derived, optional, tensor


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
    told = describe(spec, case.with_(multiprocessors=8))
    assert told["text"] == data["text"] + "; on 8 multiprocessors"


def test_derived_inputs_are_told_by_their_values(make_spec: Any) -> None:
    """Short ones whole, long ones by both ends; numbers and lists as they are; nothing where none is derived."""
    spec = make_spec(
        {
            "x": tensor("n"),
            "ends": derived(lambda n: torch.arange(n + 1) * 2),
            "far": derived(lambda n: torch.full((n,), -torch.inf)),
            "long": derived(lambda: torch.arange(100, dtype=torch.int32)),
            "none": derived(lambda: torch.empty(0, 3)),
            "count": derived(lambda n: n + 1),
        }
    )
    case = Case({"n": 3}, "float32", {"x": TensorCase("float32")})
    assert unseen_values(spec, case, torch.device("cpu"))["derived"] == {
        "ends": "int64 [4], derived: 0 2 4 6",
        "far": "float32 [3], derived: -inf -inf -inf",
        "long": "int32 [100], derived: 0 1 2 3 4 5 ... 97 98 99",
        "none": "float32 [0, 3], derived: no elements",
        "count": "4, derived",
    }


def test_small_tensors_and_constants_are_shown_by_their_values(make_spec: Any) -> None:
    """Up to 8 floats, 12 of what has no kind of values; not what is long, empty or missing, nor a constant object."""
    own = {"values": lambda shape, dtype, generator: torch.full(shape, -torch.inf, dtype=dtype)}
    spec = make_spec(
        {
            "x": tensor("n"),
            "wide": tensor("9"),
            "eps": 1e-6,
            "options": object(),
            "length": tensor("1", dtype=torch.int32, values=values.constant(36)),
            "keep": tensor("n", dtype=torch.bool, values=values.constant(1)),
            "lse": tensor("n", **own),
            "long": tensor("13", **own),
            "none": tensor("0", **own),
            "bias": optional(tensor("n", **own)),
        }
    )
    dtypes = {"length": "int32", "keep": "bool"}
    tensors = {name: TensorCase(dtypes.get(name, "float32")) for name in spec.tensors}
    case = Case({"n": 2}, "float32", tensors, absent=("bias",))
    held = {"x": "0.38748 -0.465858", "length": "36", "keep": "True True", "lse": "-inf -inf"}
    assert unseen_values(spec, case, torch.device("cpu")) == {"held": held, "constants": {"eps": "1e-06"}}
