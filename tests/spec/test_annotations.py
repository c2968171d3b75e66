"""Inputs read from jaxtyping annotations mean the same as ``tensor``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from pytest_fusion.errors import SpecError
from pytest_fusion.spec.inputs import OptionalSpec, TensorSpec
from pytest_fusion.spec.keywords import inputs_from_annotations

jaxtyping = pytest.importorskip("jaxtyping")
from jaxtyping import Bool, Complex, Float, Float16, Int, Shaped, UInt8  # noqa: E402


def annotated(**parameters: Any) -> Callable[..., None]:
    """A function with these annotations; written as a ``def``, linters would read the shape strings as code."""

    def test() -> None: ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    test.__annotations__ = parameters
    test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in parameters])  # type: ignore[attr-defined]
    return test


def test_float_follows_the_case_and_a_sized_float_is_fixed() -> None:
    """``Float`` is the case's dtype, ``Float16`` float16, ``Shaped`` the case's dtype."""

    test = annotated(x=Float[Tensor, "rows hidden"], y=Float16[Tensor, "rows"], z=Shaped[Tensor, ""], eps=float)
    found = inputs_from_annotations(test)
    assert list(found) == ["x", "y", "z"]
    assert [spec.dtypes for spec in found.values() if isinstance(spec, TensorSpec)] == [(), ("float16",), ()]
    assert found["x"].shape.names == ("rows", "hidden")  # type: ignore[union-attr]


def test_other_kinds_have_dtypes_that_torch_has() -> None:
    """``Int`` is int64 or int32, ``Bool`` bool, ``UInt8`` uint8, ``Complex`` both complex dtypes."""

    test = annotated(i=Int[Tensor, "n"], b=Bool[Tensor, "n"], u=UInt8[Tensor, "n"], c=Complex[Tensor, "n"])
    found = {name: spec.dtypes for name, spec in inputs_from_annotations(test).items() if isinstance(spec, TensorSpec)}
    assert found == {
        "i": ("int64", "int32"),
        "b": ("bool",),
        "u": ("uint8",),
        "c": ("complex64", "complex128"),
    }


def test_or_none_makes_an_optional() -> None:
    """``Float[...] | None`` is ``optional(tensor(...))``."""

    assert isinstance(inputs_from_annotations(annotated(bias=Float[Tensor, "hidden"] | None))["bias"], OptionalSpec)


def test_annotations_that_cannot_be_read_are_an_error() -> None:
    """A shape annotation whose names do not exist raises instead of vanishing."""

    with pytest.raises(SpecError, match="cannot read the annotations of test"):
        inputs_from_annotations(annotated(x="Nowhere[Tensor, 'rows']"))


def test_plain_annotations_are_no_inputs() -> None:
    """Parameters with ordinary types are left to fixtures."""

    assert inputs_from_annotations(annotated(x=int, y=str)) == {}
