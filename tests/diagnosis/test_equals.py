"""Equal values: updates of one place, ties of a maximum, and what fails of unequal ones too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytest_fusion import dim, tensor, values
from pytest_fusion.case.case_model import Layout
from pytest_fusion.case.make import ImpossibleCase
from pytest_fusion.diagnosis.diagnose import diagnose
from pytest_fusion.diagnosis.rules.equals import _apart, equals

T = torch.Tensor
BOUNDS = {"vocab": dim(2), "n": dim(2)}
GATHERED = {"table": tensor("vocab d"), "i": tensor("n", dtype=torch.int64, values=values.indices("vocab"))}
FEW = {"x": tensor("rows n", values=lambda s, d, g: torch.randint(1, 4, s, generator=g).to(d))}


class LastWins(torch.autograd.Function):
    """A backward that stores where rows of the gradient should add up."""

    @staticmethod
    def forward(ctx: Any, table: T, i: T) -> T:
        ctx.save_for_backward(i)
        ctx.shape = table.shape
        return table[i]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *given: T) -> Any:
        (i,) = ctx.saved_tensors
        found = torch.zeros(ctx.shape)
        found[i] = given[0]
        return found, None


def test_updates_of_one_place_are_named(lab_of: Any) -> None:
    """The gradient of a table of which a row is used twice."""
    lab = lab_of(
        LastWins.apply,
        lambda table, i: F.embedding(i, table),
        GATHERED,
        {"dim vocab": 3, "dim d": 2, "dim n": 7},
        dims=BOUNDS,
        grad=["table"],
        dtypes="float32",
    )
    found = diagnose(lab)
    assert (found.cause, "no two numbers of i are equal" in found.evidence[0]) == ("equal-values", True), found


def first_of_most(x: T) -> T:
    return F.one_hot(x.argmax(-1), x.shape[-1]).to(x.dtype)


def all_of_most(x: T) -> T:
    return (x >= x.amax(-1, keepdim=True)).to(x.dtype)


def test_ties_are_named(lab_of: Any) -> None:
    """All maxima of a row are marked, where the first should be."""
    lab = lab_of(all_of_most, first_of_most, FEW, {"dim rows": 2, "dim n": 6}, dims={"n": dim(2)}, dtypes="float32")
    found = diagnose(lab)
    assert (found.cause, "no two numbers of x are equal" in found.evidence[0]) == ("equal-values", True), found


WRONG = {
    "another formula": lambda x: first_of_most(x) * 2,
    "the last of all": lambda x: first_of_most(x.flip(-1)),
}


def test_ties_of_an_expanded_input_are_named_too(lab_of: Any) -> None:
    """All are equal along such an axis, and other values do not fit it: they are laid apart for the experiment."""
    expanded = lambda case: case.with_tensor("x", layout=Layout("expanded", 0, 1))  # noqa: E731
    sizes = {"dim rows": 2, "dim n": 4}
    inputs = {"x": tensor("rows n", values=values.normal())}
    found = diagnose(lab_of(all_of_most, first_of_most, inputs, sizes, change=expanded, dtypes="float32"))
    assert found.cause == "equal-values", found
    assert not any("equal values" in what for what in found.ruled_out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("ties", [True, False])
def test_numbers_of_few_digits_are_no_longer_equal_either(lab_of: Any, ties: bool, dtype: str) -> None:
    """48 numbers from 1 to 1.5 are 64 of bfloat16's; a step of a thousandth would leave some where they are."""

    def near(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> T:
        return (1 + torch.randint(0, 8, shape, generator=generator) / 16).to(dtype)

    fused = all_of_most if ties else WRONG["the last of all"]
    inputs, sizes = {"x": tensor("rows n", values=near)}, {"dim rows": 2, "dim n": 24, "dtype": dtype}
    lab = lab_of(fused, first_of_most, inputs, sizes, dims={"n": dim(2)}, dtypes=dtype)
    found = equals(lab)
    assert (found is not None) == ties, found
    assert lab.ruled_out == ([] if ties else ["equal values of x: wrong where all differ too"])


def test_as_many_numbers_as_a_dtype_has_are_none_too_many() -> None:
    """What is equal is moved up to the next free number, whatever its sign; where none is free nothing is asked."""
    t = torch.tensor([[0.0, -0.0, 1.0], [1.0, -1.0, -1.0]], dtype=torch.bfloat16)
    made = _apart(t, 2.0)
    assert len(set(made.flatten().tolist())) == 6
    assert bool(((made - t).abs() <= 2.0**-7).all())
    assert torch.equal(made.flatten().argsort(stable=True), t.flatten().argsort(stable=True))
    with pytest.raises(ImpossibleCase):
        _apart(torch.ones(200, dtype=torch.bfloat16), 2.0)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_of_unequal_numbers_is_no_matter_of_them(lab_of: Any, name: str) -> None:
    """Another factor, and an order that is the other way round, fail where all numbers differ."""
    lab = lab_of(WRONG[name], first_of_most, FEW, {"dim rows": 2, "dim n": 6}, dims={"n": dim(2)}, dtypes="float32")
    assert equals(lab) is None


def test_what_stands_in_for_equal_ones_is_of_their_range(lab_of: Any) -> None:
    """Labels from 1 on: a 0, which is a blank to the reference, was put in their places and found wrong."""

    def reference(i: T) -> T:
        return torch.cat([i[:1], i[1:] * (i[1:] != i[:-1])]).masked_fill(i == 0, 100)

    def fused(i: T) -> T:
        return i.clone()

    inputs = {"i": tensor("n", dtype=torch.int32, values=values.integers(1, 20))}
    lab = lab_of(fused, reference, inputs, {"dim n": 12}, change=lambda case: case.with_(seed=3))
    found = diagnose(lab)
    assert found.cause == "equal-values", found


def test_numbers_that_hardly_ever_repeat_are_not_asked(lab_of: Any) -> None:
    """Of numbers that all differ nothing is known of equal ones."""
    inputs = {"x": tensor("rows n", values=values.uniform(0, 1))}
    lab = lab_of(lambda x: x * 2, lambda x: x * 3, inputs, {"dim rows": 2, "dim n": 6}, dtypes="float32")
    assert equals(lab) is None
    assert not any(told.startswith("equal values") for told in lab.ruled_out)


@pytest.mark.parametrize("ties", [False, True])
def test_tiny_numbers_are_equal_and_tiny_at_once(lab_of: Any, ties: bool) -> None:
    """A floor of a product in place of its factors shows in rows of next to nothing; of ties that is no matter."""

    def cosine(a: T, b: T) -> T:
        return F.cosine_similarity(a, b, dim=-1)

    def of_first(a: T, b: T) -> T:
        return (b * first_of_most(a)).sum(-1)

    def floored(a: T, b: T) -> T:
        return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)).clamp_min(1e-8)

    def of_all(a: T, b: T) -> T:
        return (b * all_of_most(a)).sum(-1)

    def tiny(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> T:
        return torch.full(shape, 1e-12).index_fill(0, torch.arange(shape[0])[1:], 1.0).to(dtype)

    inputs = {"a": tensor("rows n", values=tiny), "b": tensor("rows n")}
    fused, reference = (of_all, of_first) if ties else (floored, cosine)
    lab = lab_of(fused, reference, inputs, {"dim rows": 3, "dim n": 4}, dims={"n": dim(2)}, dtypes="float32")
    found = equals(lab)
    assert (found is not None) == ties, found
    assert found is None or found.evidence[0].endswith("wrong where all are 3 % larger, or by 1/32 of the largest")
