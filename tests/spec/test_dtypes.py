"""Dtypes by name."""

from __future__ import annotations

import pytest
import torch

from pytest_fusion.errors import SpecError
from pytest_fusion.spec.dtypes import KNOWN, dtype_name, normalise_dtypes, simplicity


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (torch.float16, "float16"),
        ("torch.bfloat16", "bfloat16"),
        (bool, "bool"),
        ("half", "float16"),
        ("long", "int64"),
    ],
)
def test_every_way_to_say_a_dtype_has_one_name(given: object, name: str) -> None:
    """Torch's object, its text and an alias are the same dtype."""
    assert dtype_name(given) == name


@pytest.mark.parametrize("name", KNOWN)
def test_torch_has_every_known_dtype(name: str) -> None:
    """A name that a spec accepts can be made into a tensor's dtype."""
    assert isinstance(getattr(torch, name), torch.dtype)


def test_an_unknown_dtype_names_the_nearest_one() -> None:
    """A typing error in a dtype is answered with what was probably meant."""
    with pytest.raises(SpecError, match="did you mean 'bfloat16'"):
        dtype_name("bfloat61", where="x")


def test_a_dtype_list_drops_what_is_said_twice_and_may_not_be_empty() -> None:
    """Duplicates count once; an empty list leaves nothing to draw and is an error."""
    assert normalise_dtypes(["half", torch.float16, "float32"]) == ("float16", "float32")
    with pytest.raises(SpecError, match="no dtype is left"):
        normalise_dtypes([], where="tensor('n')")


def test_float32_is_the_plainest_dtype() -> None:
    """Shrinking goes to float32, and from bfloat16 to float16 before that."""
    assert simplicity("float32") == 0
    assert simplicity("float16") < simplicity("bfloat16")
