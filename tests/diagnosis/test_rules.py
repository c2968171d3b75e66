"""Causes that single elements, further slices, another order and empty selections tell, beside their look-alikes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from pytest_fusion import dim, tensor, values
from pytest_fusion.diagnosis import diagnose as module
from pytest_fusion.diagnosis.diagnose import UNEXPLAINED, diagnose
from pytest_fusion.diagnosis.rules import indices, numerics
from pytest_fusion.spec.inputs import derived
from tests.sweeps import first_of_each, sweep

T = torch.Tensor


def turned(x: T, first: list[int], second: list[int]) -> T:
    """The first four columns turned in pairs, the others as they are."""
    out = x.clone()
    out[:, first] = x[:, first] * 0.6 - x[:, second] * 0.8
    out[:, second] = x[:, second] * 0.6 + x[:, first] * 0.8
    return out


def by_groups(x: T, w: T, b: T) -> T:
    return x * w + b


def by_first_group(x: T, w: T, b: T) -> T:
    per = len(w) // 2
    return x * w[:per].repeat(2) + b[:per].repeat(2)


def column_of_neighbour(x: T, w: T) -> T:
    """A product with the weight's columns in another order: each element is a sum of the wrong products."""
    return x @ w.roll(1, 1)


def by_largest(x: T) -> T:
    return x / x.abs().amax(-1, keepdim=True).clamp(min=0.01)


def by_signed_largest(x: T) -> T:
    return x / x.amax(-1, keepdim=True).clamp(min=0.01)


def double(x: T) -> T:
    return x * 2


def stores_few_rows(x: T) -> T:
    return torch.cat([x[:8] * 2, torch.zeros_like(x[8:])])


def kept(rows: int, hidden: int, generator: torch.Generator) -> T:
    return torch.rand(rows, hidden, generator=generator) < 0.3


def mean_of_kept(x: T, keep: T) -> T:
    return (x * keep).sum() / keep.sum().clamp(min=1)


def mean_of_kept_or_nan(x: T, keep: T) -> T:
    return (x * keep).sum() / keep.sum()


def largest_of_kept(x: T, keep: T) -> T:
    if not x.shape[1]:
        return x.new_zeros(x.shape[0])
    return torch.where(keep.any(-1), torch.where(keep, x, -torch.inf).amax(-1), 0.0)


def largest_of_kept_or_nothing(x: T, keep: T) -> T:
    return torch.where(keep, x, -9.0).amax(-1) if x.shape[1] else x.new_full((x.shape[0],), -9.0)


def mean_of_kept_and_one(x: T, keep: T) -> T:
    return mean_of_kept(x, keep) + 1


def means_of_kept(x: T, keep: T) -> T:
    return torch.stack([mean_of_kept(row, kept) for row, kept in zip(x, keep, strict=True)]) if len(x) else x.sum(-1)


def means_of_kept_but_the_last(x: T, keep: T) -> T:
    """9 stands in the last row, whatever it keeps."""
    return means_of_kept(x, keep).index_fill(0, torch.arange(len(x))[-1:], 9.0)


def kept_before_the_last(rows: int, hidden: int, generator: torch.Generator) -> T:
    keep = torch.rand(rows, hidden, generator=generator) < 0.7
    keep[-1:] = False
    return keep


def added_up(w: T, index: T, bins: T) -> T:
    out = w.new_zeros(len(bins)).index_add(0, index, w)
    return out.index_fill(0, torch.tensor([0]), 0.0)


def added_up_all(w: T, index: T, bins: T) -> T:
    return w.new_zeros(len(bins)).index_add(0, index, w)


def and_the_next(x: T) -> T:
    return x + x[:, torch.arange(1, x.shape[1] + 1).clamp(max=x.shape[1] - 1)]


def and_the_next_of_so_many_rows(x: T) -> T:
    """The bound of the columns is that of the rows."""
    return (
        x + x[:, torch.arange(1, x.shape[1] + 1).clamp(max=x.shape[0] - 1)] if len(x) <= x.shape[1] else and_the_next(x)
    )


def weighed(x: T, lse: T) -> T:
    """Where there was nothing to add up the logarithm is infinite, of either sign."""
    return x * torch.where(torch.isinf(lse), 0.0, lse.exp())


def some_infinite(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> T:
    drawn = torch.randn(shape, generator=generator)
    drawn[torch.rand(shape, generator=generator) < 0.2] = torch.inf
    return drawn.to(dtype)


def left_out(rows: int, hidden: int, generator: torch.Generator) -> T:
    mask = torch.where(torch.rand(rows, hidden, generator=generator) < 0.3, -torch.inf, 0.0)
    return mask.index_fill(0, torch.arange(rows)[-1:], -torch.inf)


def shares(x: T, mask: T) -> T:
    return torch.softmax(x + mask, -1).nan_to_num(0.0)


@dataclass(frozen=True)
class Row:
    cause: str
    fused: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: dict[str, Any]
    choice: dict[str, Any]
    keywords: dict[str, Any] = field(default_factory=lambda: {"dtypes": "float32"})


X = {"x": tensor("rows hidden")}
GROUPS = {"x": tensor("rows 2*per"), "w": tensor("2*per"), "b": tensor("2*per")}
NARROWED_GROUPS = {
    "x": tensor("rows 2*per"),
    "w": tensor("2*per", values=values.positive()),
    "b": tensor("2*per", values=values.normal()),
}
INFINITE = {
    "x": tensor("rows hidden", values=values.normal()),
    "lse": tensor("rows hidden", dtype=torch.float32, values=some_infinite),
}
MASKED = {"x": tensor("rows hidden", values=values.normal()), "mask": derived(left_out)}
PRODUCT = {"x": tensor("rows inner"), "w": tensor("inner cols")}
KEPT = {"x": tensor("rows hidden"), "keep": derived(kept)}
BINS = {
    "w": tensor("n"),
    "index": tensor("n", dtype=torch.int64, values=values.indices("bins")),
    "bins": tensor("bins"),
}

TABLE: dict[str, Row] = {
    "pairs in place of halves, of some columns": Row(
        "wrong-index-map", lambda x: turned(x, [0, 2], [1, 3]), lambda x: turned(x, [0, 1], [2, 3]),
        {"x": tensor("rows 6")}, {"dim rows": 1},
    ),
    "two weights of the first group": Row(
        "wrong-index-map", by_first_group, by_groups, GROUPS, {"dim rows": 2, "dim per": 1}
    ),
    "two weights of the first group, with values of their own": Row(
        "wrong-index-map", by_first_group, by_groups, NARROWED_GROUPS, {"dim rows": 2, "dim per": 1}
    ),
    "columns bounded by the number of rows": Row(
        "wrong-index-map", and_the_next_of_so_many_rows, and_the_next, X, {"dim rows": 1, "dim hidden": 2}
    ),
    "wrong beside the infinities that a function draws": Row(
        "unexplained", lambda x, lse: weighed(x, lse) + 0.1 * x.abs(), weighed, INFINITE,
        {"dim rows": 3, "dim hidden": 5},
    ),
    "other columns of a product": Row(
        "wrong-index-map", column_of_neighbour, lambda x, w: x @ w, PRODUCT,
        {"dim rows": 1, "dim inner": 2, "dim cols": 2},
    ),
    "the largest instead of the furthest from 0": Row(
        "unexplained", by_signed_largest, by_largest, X, {"dim rows": 2, "dim hidden": 3}
    ),
    "rows past the eighth are not reached": Row(
        "block-limit", stores_few_rows, double, X, {"dim rows": 9, "dim hidden": 2}
    ),
    "a mean of none": Row("zero-size", mean_of_kept_or_nan, mean_of_kept, KEPT, {"dim rows": 0, "dim hidden": 1}),
    "the largest of none": Row(
        "zero-size", largest_of_kept_or_nothing, largest_of_kept, KEPT, {"dim rows": 1, "dim hidden": 0}
    ),
    "a row that is wrong and keeps nothing by chance": Row(
        "unexplained", means_of_kept_but_the_last, means_of_kept,
        {"x": tensor("rows hidden"), "keep": derived(kept_before_the_last)}, {"dim rows": 2, "dim hidden": 0},
    ),
    "a mean that is wrong of some too": Row(
        "unexplained", mean_of_kept_and_one, mean_of_kept, KEPT, {"dim rows": 0, "dim hidden": 1}
    ),
    "a bin that pads": Row("unexplained", added_up_all, added_up, BINS, {"dim n": 3, "dim bins": 1}),
}  # fmt: skip


def by_another_path(x: T) -> T:
    """From eight rows on, large elements have another formula."""
    return double(x) + (x > 0.5) * (len(x) >= 8)


def with_a_sum_of_rows(x: T) -> T:
    return double(x) + x[1:].sum(0)


@pytest.mark.parametrize(("fused", "cause"), [(by_another_path, "batch-variant"), (by_largest, None)])
def test_a_number_of_slices_that_decides_is_named(lab_of: Any, fused: Any, cause: str | None) -> None:
    """Copies of a slice are as wrong as it is among others; what is wrong alone has another cause."""
    lab = lab_of(fused, double, X, {"dim rows": 8, "dim hidden": 2, "dtype": "bfloat16"})
    found = indices.mixed(lab)
    assert (found.cause if found is not None else None) == cause, found


def test_slices_that_depend_on_what_others_hold_are_mixed_up(lab_of: Any) -> None:
    """Copies of a slice have another sum."""
    lab = lab_of(with_a_sum_of_rows, double, X, {"dim rows": 8, "dim hidden": 2}, dtypes="float32")
    found = indices.mixed(lab)
    assert found is not None
    assert found.cause == "wrong-index-map", found


def test_a_number_of_slices_needs_runs(lab_of: Any) -> None:
    """Two runs show neither a slice alone nor its copies."""
    lab = lab_of(by_another_path, double, X, {"dim rows": 8, "dim hidden": 2}, max_runs=2)
    assert indices.mixed(lab) is None


def ends(x: T) -> T:
    return x.float().flip(-1).cumsum(-1).flip(-1).to(x.dtype)


def whole_less_the_start(x: T) -> T:
    wide = x.float()
    return (wide.sum(-1, keepdim=True) - wide.cumsum(-1) + wide).to(x.dtype)


def by_a_product(x: T) -> T:
    return (x.float() @ torch.ones(x.shape[1], x.shape[1]).tril()).to(x.dtype)


@pytest.mark.parametrize(
    ("fused", "cause"), [(whole_less_the_start, "low-precision-accumulation"), (by_a_product, "nan-mishandled")]
)
def test_what_is_taken_away_again_leaves_its_rounding(lab_of: Any, fused: Any, cause: str) -> None:
    """NaN minus NaN is NaN as 0 times NaN is; of a large number only the difference leaves an error."""
    more: dict[str, Any] = {"dtypes": "float32", "change": lambda case: case.with_tensor("x", regime="nan")}
    found = numerics.special(lab_of(fused, ends, X, {"dim rows": 3, "dim hidden": 6}, **more))
    assert found is not None
    assert found.cause == cause, found


@sweep("name", TABLE, fast=first_of_each(TABLE, lambda name: TABLE[name].cause))
def test_experiments_name_the_cause(lab_of: Any, name: str) -> None:
    """Each row is a kernel that is wrong in one way, on a small case, and the cause or that none is sure."""
    row = TABLE[name]
    bounds = {"bins": dim(1, 40)} if "bins" in row.inputs else {}
    found = diagnose(lab_of(row.fused, row.reference, row.inputs, row.choice, dims=bounds, **row.keywords))
    assert found.cause == row.cause, found
    assert not [said for said in found.ruled_out if "could not run" in said], found.ruled_out


@pytest.mark.parametrize("name", ["two weights of the first group", "a mean of none"])
def test_few_runs_name_no_cause(lab_of: Any, name: str) -> None:
    """One or two seeds are no evidence."""
    row = TABLE[name]
    found = diagnose(lab_of(row.fused, row.reference, row.inputs, row.choice, max_runs=3, **row.keywords))
    assert found.cause == "unexplained", found


@pytest.mark.slow
def test_the_element_that_is_taken_is_named(lab_of: Any) -> None:
    """The evidence says which element reaches the wrong one, and which should."""
    row = TABLE["two weights of the first group"]
    found = diagnose(lab_of(row.fused, row.reference, row.inputs, row.choice, **row.keywords))
    assert "which it must not, and not with" in found.evidence[0]
    assert "[0]" in found.evidence[0]
    assert "[1]" in found.evidence[0]


def decayed(x: T, w: T, rate: float) -> T:
    return x + rate * w.nan_to_num()


def decayed_apart(x: T, w: T, rate: float) -> T:
    """Another formula, which for a rate of 0 differs by no finite number."""
    return x + (rate * w * 0.5)


@pytest.mark.slow
def test_a_factor_of_0_is_no_proof_that_nan_is_at_fault(lab_of: Any) -> None:
    """Where another rate is wrong for finite numbers too, NaN only showed what 0 hides; by itself it is the cause."""
    inputs = {"x": tensor("n"), "w": tensor("n"), "rate": st.sampled_from([0.0, 0.5])}
    more: dict[str, Any] = {"dtypes": "float32", "change": lambda case: case.with_tensor("w", regime="nan")}
    for fused, causes in ((decayed_apart, {"unexplained"}), (spreads, {"reads-padding"})):
        lab = lab_of(fused, decayed, inputs, {"dim n": 4, "value rate": 0.0}, pools={"rate": (0.0, 0.5)}, **more)
        found = diagnose(lab)
        assert found.cause in causes, found


def spreads(x: T, w: T, rate: float) -> T:
    return x + rate * w


def test_a_row_of_one_element_masks_nothing(lab_of: Any) -> None:
    """A softmax over one element is 1 whatever that is; overflowing in it is no matter of padding."""

    def fused(x: T) -> T:
        power = x.exp()
        return power / power.sum(-1, keepdim=True)

    sizes = {"dim rows": 12, "dim hidden": 1, "dtype": "float32", "values": "hundred"}
    lab = lab_of(fused, lambda x: torch.softmax(x, -1), {"x": tensor("rows hidden")}, sizes)
    found = diagnose(lab)
    assert found.cause == "missing-max-subtraction", found


def _clamped(x: T) -> T:
    return x.mul(50).round().clamp(-128, 127).to(torch.int8)


def _code(x: T) -> T:
    return x.mul(0.1).round().to(torch.int8)


@sweep(
    ("fused", "reference", "cause"),
    [
        (lambda x: x.mul(50).round().to(torch.int32).to(torch.int8), _clamped, "overflow"),
        (lambda x: _code(x) + (x > 30), _code, None),
        (lambda x: x.masked_fill(x > 1.3, -torch.inf), lambda x: x + 0, None),
    ],
    ids=["not clamped", "code too high", "threshold"],
)
def test_overflow_is_where_a_dtype_ends(
    lab_of: Any, fused: Callable[[T], T], reference: Callable[[T], T], cause: str | None
) -> None:
    """Codes that are not clamped leave a dtype; codes too high by one, and a threshold, do not."""
    sizes = {"dim rows": 12, "dim hidden": 17, "dtype": "float32"}
    lab = lab_of(fused, reference, {"x": tensor("rows hidden")}, {**sizes, "values": "hundred"})
    found = diagnose(lab)
    assert (found.cause == "overflow") == (cause == "overflow"), found
    assert found.cause != "wrong-index-map", found


@sweep(
    ("profile", "choice", "fused", "cause"),
    [
        (values.uniform(-200, 200), {}, lambda x: torch.log(1 + x.exp()), "missing-max-subtraction"),
        (values.normal(0, 100), {}, lambda x: torch.log(1 + x.exp()), "missing-max-subtraction"),
        (values.one_of(values.normal(), values.uniform(-200, 200)), {"choice x": 1}, lambda x: torch.log(1 + x.exp()),
         "missing-max-subtraction"),
        (values.uniform(100, 200), {}, lambda x: torch.log(1 + x.exp()), "unexplained"),
        (values.uniform(-200, 200), {}, lambda x: F.softplus(x).masked_fill(x > 1.3, torch.inf), "unexplained"),
    ],
    ids=["uniform", "normal", "one of several", "never small", "threshold"],
    fast=("uniform", "normal"),
)  # fmt: skip
def test_values_around_0_may_be_scaled_down(
    lab_of: Any, profile: Any, choice: dict[str, Any], fused: Callable[[T], T], cause: str
) -> None:
    """What a spec asks for around 0 may as well be smaller, which tells an overflow; what lies far above 0 may not."""
    sizes = {"dim rows": 12, "dim hidden": 17, "dtype": "float32", **choice}
    lab = lab_of(fused, lambda x: F.softplus(x) + 0, {"x": tensor("rows hidden", values=profile)}, sizes)
    found = diagnose(lab)
    assert found.cause == cause, found


@pytest.mark.slow
def test_no_rule_takes_all_runs(lab_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that asks without end leaves the rules after it their share."""

    def endless(lab: Any) -> None:
        for seed in range(10_000):
            lab.attempt(lab.base.with_(seed=seed))

    row = TABLE["two weights of the first group"]
    monkeypatch.setitem(module._RULES, "values", (endless, *module._OF_VALUES))
    found = module.diagnose(lab_of(row.fused, row.reference, row.inputs, row.choice, **row.keywords))
    assert found.cause == "wrong-index-map", found


@pytest.mark.parametrize(("rows", "share"), [(17, 60.0), (33, 80.0)])
def test_an_error_that_one_slice_bears_is_no_wrong_index(lab_of: Any, rows: int, share: float) -> None:
    """Each row's sum is off by some units more than the fence allows: no row takes another's."""

    def fused(x: torch.Tensor) -> torch.Tensor:
        exact = x.double().sum(-1)
        return (exact + share * 2.0**-24 * x.double().abs().sum(-1) * torch.sin(1e5 * exact)).to(x.dtype)

    sizes = {"dim rows": rows, "dim hidden": 65, "dtype": "float32"}
    lab = lab_of(fused, lambda x: x.sum(-1), {"x": tensor("rows hidden")}, sizes)
    assert diagnose(lab).cause != "wrong-index-map"


def _rising(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype).sort().values


@pytest.mark.parametrize("strided", [True, False])
def test_a_layout_that_few_seeds_show_is_named(lab_of: Any, strided: bool) -> None:
    """One number below two edges shows their order for few seeds; what contiguous ones do not cure is no layout."""

    def fused(x: T, edges: T) -> T:
        if not strided:
            return torch.bucketize(x, edges) + (x < -1)
        return torch.bucketize(x, edges if edges.is_contiguous() else edges.flip(0))

    inputs = {"x": tensor("n", values=values.normal(-2.0)), "edges": tensor("bins", values=_rising)}
    choice = {"dim n": 1, "dim bins": 2, "dtype": "float32", "layout edges": ("step", 0)}
    lab = lab_of(fused, lambda x, edges: torch.bucketize(x, edges, right=False), inputs, choice)
    assert not any(lab.attempt(lab.base.with_(seed=seed)).wrong for seed in (1, 2, 3)) or not strided
    found = diagnose(lab)
    assert (found.cause == "ignores-strides") is strided, found


@pytest.mark.parametrize("strided", [True, False])
def test_without_time_one_contiguous_copy_decides(lab_of: Any, strided: bool) -> None:
    """The first of its experiments; where the copy is wrong too nothing is known."""

    def fused(x: T) -> T:
        return 2 * x if strided and x.is_contiguous() else 2 * x + 1

    choice = {"dim rows": 4, "dim hidden": 5, "dtype": "float32", "layout x": ("padded", 0)}
    lab = lab_of(fused, lambda x: 2 * x, {"x": tensor("rows hidden")}, choice, max_runs=3)
    assert diagnose(lab).cause == ("ignores-strides" if strided else UNEXPLAINED)
