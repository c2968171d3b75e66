"""Shape strings: what they evaluate to, and what they refuse."""

from __future__ import annotations

import pytest

from pytest_fusion.errors import SpecError
from pytest_fusion.spec.dims import Dim, dim, named_apart, parse_expression, parse_shape


@pytest.mark.parametrize(
    ("text", "sizes", "shape"),
    [
        ("rows hidden", {"rows": 3, "hidden": 5}, (3, 5)),
        ("rows 2*half", {"rows": 3, "half": 5}, (3, 10)),
        ("seq+1", {"seq": 0}, (1,)),
        ("n//2 n%2 n-1", {"n": 7}, (3, 1, 6)),
        ("4 rows", {"rows": 2}, (4, 2)),
        ("*batch hidden", {"batch": (2, 3), "hidden": 5}, (2, 3, 5)),
        ("*batch hidden", {"batch": (), "hidden": 5}, (5,)),
        ("heads=4 rows", {"rows": 2}, (4, 2)),
        ("", {}, ()),
    ],
)
def test_a_shape_string_evaluates_to_its_sizes(text: str, sizes: dict, shape: tuple) -> None:
    """Names, integers, expressions and a batch become the shape that the sizes give them."""
    assert parse_shape(text).evaluate(sizes) == shape


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("rows 2**k", "unsupported expression"),
        ("rows 2*", "cannot read dim '2*'"),
        ("f(x)", "unsupported expression"),
        ("*a *b c", "more than one '*' term"),
        ("* rows", "'*' takes a name"),
        ("#rows", "write two specs"),
        ("rows, hidden", "blanks alone part dims"),
        ("seq - 1", "cannot read dim '-': expected a name, an integer or an expression without blanks"),
    ],
)
def test_a_shape_string_that_means_nothing_is_refused(text: str, part: str) -> None:
    """A term outside the grammar raises an error that quotes it."""
    with pytest.raises(SpecError, match=part.replace("*", r"\*")):
        parse_shape(text)


def test_anonymous_dims_of_two_inputs_are_two_dims() -> None:
    """``_`` and ``...`` get a name from their position and from the input that owns them."""
    x, y = (named_apart(parse_shape("... _"), owner) for owner in ("x", "y"))
    assert not set(x.names) & set(y.names)
    assert len(x.batch_names) == 1


def test_the_axis_of_a_dim_counts_the_batch_before_it() -> None:
    """A dim behind a batch of two lies on axis 2; a dim inside an expression lies on none."""
    shape = parse_shape("*batch rows 2*half")
    sizes = {"batch": (2, 3), "rows": 5, "half": 7}
    assert shape.axis_of("rows", sizes) == 2
    assert shape.axis_of("half", sizes) is None


def test_an_expression_lists_each_name_once() -> None:
    """``a*a+b`` depends on two names."""
    assert sorted(parse_expression("a*a+b").names) == ["a", "b"]


@pytest.mark.parametrize(
    "arguments",
    [{"min": -1}, {"min": 4, "max": 3}, {"multiple_of": 0}, {"min": 9, "max": 15, "multiple_of": 8}],
)
def test_bounds_without_a_size_are_refused(arguments: dict) -> None:
    """``dim`` raises where no size satisfies its bounds together."""
    with pytest.raises(SpecError, match="dim"):
        dim(**arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("batch", 20), r"dim\(min='batch'\): expected an integer; another dim's size can be named in multiple_of="),
        ((1, "batch"), r"dim\(max='batch'\): expected an integer; another"),
        ((1.0,), r"dim\(min=1.0\): expected an integer$"),
        ((None,), r"dim\(min=None\): expected an integer$"),
        ((True,), r"dim\(min=True\): expected an integer$"),
    ],
)
def test_bounds_of_another_type_are_refused_by_name(arguments: tuple, said: str) -> None:
    """The argument is named, and what may name another dim."""
    with pytest.raises(SpecError, match=said):
        dim(*arguments)
    with pytest.raises(SpecError, match=r"multiple_of=2.5\): expected an integer or the name of a dim"):
        dim(multiple_of=2.5)


def test_bounds_hold_together() -> None:
    """The example of the contract gives the bounds that it names."""
    assert dim(1, 8192, multiple_of=8) == Dim(1, 8192, 8)
