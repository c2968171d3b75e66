"""Wrong arguments of what users call: an error of this package with the right word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_fusion import FusionSpec, SpecError, Tolerance, canary, dim, fused_equivalent, tensor, values
from pytest_fusion.canary import Policy
from pytest_fusion.errors import CanaryError


@pytest.mark.parametrize(
    ("call", "error", "line"),
    [
        (lambda: fused_equivalent(abs, abs), SpecError, "fused_equivalent() takes reference by position; give what"),
        (
            lambda: FusionSpec(refrence=abs),
            SpecError,
            "FusionSpec() has no keyword 'refrence'; did you mean",
        ),
        (lambda: FusionSpec(abs), SpecError, "FusionSpec() takes nothing by position; give what follows by name"),
        (lambda: tensor("rows", dtpe="float32"), SpecError, "tensor() has no keyword 'dtpe'; did you mean 'dtype'?"),
        (tensor, SpecError, "tensor() is missing a required argument: 'dims'"),
        (lambda: dim(1, 2, 3), SpecError, "dim() takes min and max by position; give what follows by name"),
        (lambda: Tolerance(rtoll=1), SpecError, "Tolerance() has no keyword 'rtoll'; did you mean 'rtol'?"),
        (lambda: values.normal(sdt=1), SpecError, "normal() has no keyword 'sdt'; did you mean 'std'?"),
        (lambda: canary("n", incumbent=abs, candidat=abs), CanaryError, "canary() has no keyword 'candidat'; did you"),
        (lambda: Policy(stat="off"), CanaryError, "Policy() has no keyword 'stat'; did you mean 'state'?"),
    ],
)
def test_a_wrong_argument_names_the_right_word(call: Callable[[], Any], error: type[Exception], line: str) -> None:
    """And no bare TypeError."""
    with pytest.raises(error) as caught:
        call()
    assert line in str(caught.value)


@pytest.mark.parametrize("dims", ["rows in", "rows 2*is", "*in rows", "None"])
def test_a_keyword_is_no_dim(dims: str) -> None:
    """No parameter can have its name; the error says that it is one of Python's."""
    with pytest.raises(SpecError, match=r"'(in|is|None)' is a Python keyword; call it '(in|is|None)_'"):
        tensor(dims)


def test_a_type_error_of_the_callees_own_is_left_as_it_is() -> None:
    """The arguments are right; the fault is further in."""

    class Broken:
        def __str__(self) -> str:
            raise TypeError("broken")

    with pytest.raises(TypeError, match="broken"):
        tensor([Broken()])  # type: ignore[list-item]
