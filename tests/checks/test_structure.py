"""Check ``structure``: nesting, shape, dtype, plain values and shared memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.checks.structure import overlap, sharing

T = torch.Tensor


@dataclasses.dataclass
class Result:
    out: T
    lse: T | None


class Pair(NamedTuple):
    out: T
    lse: T


class Sub(T):
    """A tensor that may compute what it likes when it is looked at."""


def own_method(x: T) -> T:
    out = x + 1
    out.eq = lambda other: torch.ones(())  # type: ignore[method-assign]
    return out


WRONG: dict[str, tuple[Callable[[T], Any], Callable[[T], Any], str]] = {
    "shape": (lambda x: x.sum(-1), lambda x: x.sum(-1, keepdim=True), "shape"),
    "dtype": (lambda x: x.double(), lambda x: x + 1, "dtype"),
    "nesting": (lambda x: (x + 1,), lambda x: x + 1, "returned (tensor), the reference tensor"),
    "missing": (lambda x: (x + 1, None), lambda x: (x + 1, x + 2), "None"),
    "key": (lambda x: {"a": x + 1}, lambda x: {"b": x + 1}, "'a'"),
    "number": (lambda x: (x + 1, 3), lambda x: (x + 1, 4), "out[1] is 3, the reference's is 4"),
    "float": (lambda x: (x + 1, 0.5), lambda x: (x + 1, 0.51), "out[1] is 0.5"),
    "alias of an input": (lambda x: x, lambda x: x.clone(), "shares memory with x"),
    "view of an input": (lambda x: x[:, :2], lambda x: x[:, :2].clone(), "shares memory with x"),
    "subclass": (lambda x: (x + 1).as_subclass(Sub), lambda x: x + 1, "out is a Sub, the reference's is a Tensor"),
    "method of its own": (own_method, lambda x: x + 1, "out is a tensor whose eq is its own"),
    "two outputs": (lambda x: (x + 1,) * 2, lambda x: (x + 1, x + 1), "out[0] shares memory with out[1]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_structure_fails_and_is_named(judge_one: Any, name: str) -> None:
    """Each difference in what is returned fails ``structure`` with both sides in the message."""
    fused, reference, part = WRONG[name]
    failure = judge_one(fused, reference).failure
    assert failure is not None
    assert failure.check == "structure"
    assert part in failure.reason


RIGHT: dict[str, Callable[[T], Any]] = {
    "tensor": lambda x: x + 1,
    "nested": lambda x: {"a": [x + 1, (x.sum(), None)], "b": 3, "c": "word"},
    "dataclass": lambda x: Result(x + 1, None),
    "named tuple": lambda x: Pair(x + 1, x.sum(-1)),
    "integer and bool": lambda x: (x > 0, x.argsort(dim=-1, stable=True), x.long()),
    "0-d and empty": lambda x: (x.sum(), x[:0]),
    "a float": lambda x: (x + 1, float(x.sum())),
    "nan": lambda x: (x + 1, float("nan")),
    "a shape": lambda x: (x + 1, x.shape, x.dtype),
    "an array": lambda x: (x + 1, x[0].numpy(force=True).copy()),
    "an object": lambda x: (x + 1, object()),
    "complex": lambda x: torch.complex(x, x + 1).conj(),
}


@pytest.mark.parametrize("name", RIGHT)
def test_equal_structures_of_any_nesting_pass(judge_one: Any, name: str) -> None:
    """Containers, dataclasses, numbers, None and tensors of every kind compare equal to themselves."""
    result = judge_one(RIGHT[name], RIGHT[name], again=True)
    assert result.failure is None
    assert result.rejected is None


def test_a_tuple_may_stand_for_a_list(judge_one: Any) -> None:
    """Sequences compare by their items."""
    assert judge_one(lambda x: [x + 1, x], lambda x: (x + 1, x)).failure is None


def test_a_view_that_the_reference_returns_too_is_no_alias(judge_one: Any) -> None:
    """Where the reference hands out its input, so may the kernel; it need not."""
    assert judge_one(lambda x: x.view_as(x), lambda x: x).failure is None
    assert judge_one(lambda x: x.clone(), lambda x: x).failure is None


def test_views_of_an_expanded_input_share_what_it_shares(judge_one: Any) -> None:
    """Views that lie apart in a plain input meet in one with a stride of 0; two that meet in a plain one are caught."""
    halves = lambda x: (x[:, :3], x[:, 3:6])  # noqa: E731
    for variant in (0, 1):
        expanded = Case(
            {"rows": 5, "hidden": 7}, "float32", {"x": TensorCase("float32", Layout("expanded", 0, variant))}
        )
        assert judge_one(halves, halves, case=expanded).failure is None
        own = judge_one(lambda x: (x[:, :3].clone(), x[:, 3:6]), halves, case=expanded)
        assert own.failure is None
        fresh = judge_one(lambda x: ((y := x[:, :3] * 2), y), lambda x: (x[:, :3] * 2, x[:, :3] * 2), case=expanded)
        assert fresh.failure.identity == "structure:aliasing"
    plain = judge_one(lambda x: (x[:, :3], x[:, :3]), lambda x: (x[:, :3], x[:, :3] + 0))
    assert plain.failure.identity == "structure:aliasing"


@pytest.mark.parametrize("keyword", ["mutates", "clobbers"])
def test_results_may_lie_in_what_the_kernel_may_write(judge_one: Any, keyword: str) -> None:
    """A kernel that returns a view of an input it is allowed to write is not accused of sharing."""

    def fused(x: T) -> T:
        x.mul_(2)
        return x.reshape(-1, x.shape[-1]).view_as(x)

    def reference(x: T) -> T:
        y = x * 2
        if keyword == "mutates":
            x.copy_(y)
        return y

    assert judge_one(fused, reference, **{keyword: "x"}).failure is None


def test_floats_are_compared_at_the_precision_of_the_inputs(judge_one: Any) -> None:
    """A Python float computed from float16 inputs may be off by 8 units of float16, not by more."""
    case = Case({"rows": 5, "hidden": 7}, "float16", {"x": TensorCase("float16")})

    def off(by: float) -> Any:
        reference = lambda x: (x + 1, 2.0)  # noqa: E731 - a reference in one line
        return judge_one(lambda x: (x + 1, 2.0 * (1 + by)), reference, case=case, dtypes="float16").failure

    assert off(4 * 2.0**-10) is None
    assert off(12 * 2.0**-10) is not None


def test_interleaved_views_do_not_overlap() -> None:
    """Even and odd columns of one storage share no element; a column and its matrix do."""
    x = torch.zeros(4, 6)
    assert not overlap(x[:, 0::2], x[:, 1::2])
    assert overlap(x[:, 0::2], x[:, 2])
    assert not overlap(x[:0], x)
    assert not overlap(x, torch.zeros(4, 6))
    assert sharing({"a": x[0], "b": x[1:]}, {"x": x}) == {("a", "x"), ("b", "x")}


def test_sharing_is_found_in_every_layout(judge_one: Any) -> None:
    """A kernel that returns ``x.contiguous()`` aliases where the layout lets it, and is caught there."""
    fused = lambda x: x.contiguous()  # noqa: E731
    transposed = Case({"rows": 5, "hidden": 7}, "float32", {"x": TensorCase("float32", Layout("transposed"))})
    assert judge_one(fused, torch.clone, case=transposed).failure is None
    assert judge_one(fused, torch.clone).failure.identity == "structure:aliasing"
