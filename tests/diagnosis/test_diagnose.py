"""Planted kernels and the causes that experiments name, beside look-alikes for which another must be named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.diagnosis.causes import CAUSES
from pytest_fusion.diagnosis.diagnose import diagnose
from pytest_fusion.spec.inputs import derived, tensor
from tests.diagnosis.wrong import (
    BIG,
    PLAIN,
    ROWS,
    T,
    assumes_contiguous,
    assumes_matrices_side_by_side,
    assumes_rows_far_apart,
    caching,
    centred_norm,
    centred_norm_without_bias,
    copies_rows_by_fours,
    cuts_at_threshold,
    double,
    drops_tail,
    drops_tail_of_sum,
    exponentials,
    fails_when_empty,
    first_row_only,
    hidden_mask,
    laid,
    masked_softmax,
    masks_after_maximum,
    matmul,
    matmul_in_bfloat16,
    mean_by_one_less,
    misses_carry,
    mixes_rows,
    multiplies_mask,
    naive_variance,
    needs_aligned_rows,
    needs_alignment,
    negated,
    norm,
    norm_of_constant,
    norm_with_constant_inside,
    norm_with_eps_outside,
    norm_with_offset,
    pads_exponential_by_product,
    pads_maximum_with_zero,
    pads_softmax_with_zero,
    pairs_of_odd_width,
    relu_beside_nan,
    scale,
    scale_with_small_floor,
    second_and_third,
    softmax,
    starts_at_storage,
    stops_at_limit,
    sums_in_input_dtype,
    swaps_rows,
    times,
    to_float8,
    to_float8_by_bfloat16,
    total,
    total_of_rows,
    triple,
    triple_and_one,
    valued,
    variance,
    wrong_gelu,
)
from tests.sweeps import first_of_each, sweep


@dataclass(frozen=True)
class Row:
    cause: str
    fused: Callable[..., Any]
    reference: Callable[..., Any]
    choice: dict[str, Any] = field(default_factory=lambda: PLAIN)
    change: Callable[[Case], Case] = lambda case: case
    blocks: tuple[int, ...] = ()
    inputs: dict[str, Any] = field(default_factory=lambda: ROWS)
    keywords: dict[str, Any] = field(default_factory=dict)


WEIGHTED = {"x": tensor("rows hidden"), "w": tensor("rows hidden")}
PRODUCT = {"x": tensor("rows inner"), "w": tensor("inner cols")}
MASKED = {"x": tensor("rows hidden"), "keep": derived(second_and_third)}
EPS = {"x": tensor("rows hidden"), "eps": 1e-6}
AFFINE = {"x": tensor("rows hidden"), "w": tensor("hidden"), "b": tensor("hidden"), "eps": 1e-5}
STEP = {**WEIGHTED, "rate": 1e-3}
MATMUL = {"dim rows": 3, "dim inner": 9, "dim cols": 4}

TABLE: dict[str, Row] = {
    "strides": Row("ignores-strides", assumes_contiguous, double, change=laid("transposed")),
    "padded strides": Row("ignores-strides", assumes_contiguous, double, change=laid("padded")),
    "matrices without their gap": Row(
        "ignores-strides", assumes_matrices_side_by_side, double, {"dim batch": 2, "dim rows": 2, "dim hidden": 3},
        inputs={"x": tensor("batch rows hidden")}, change=laid("padded", 0, 1),
    ),
    "alignment of rows, with a gap between matrices": Row(
        "needs-alignment", needs_aligned_rows, double, {"dim batch": 2, "dim rows": 3, "dim hidden": 6},
        inputs={"x": tensor("batch rows hidden")}, change=laid("padded", 0, 1),
    ),
    "an expanded tensor of a kernel that ignores all strides": Row(
        "ignores-strides", assumes_contiguous, double, change=laid("expanded", 0, 1)
    ),
    "only an expanded tensor": Row("ignores-strides", assumes_rows_far_apart, double, change=laid("expanded")),
    "offset": Row("ignores-offset", starts_at_storage, double, change=laid("contiguous", 3)),
    "an offset beside strides that are honoured": Row(
        "ignores-offset", starts_at_storage, double, change=laid("padded", 3)
    ),
    "alignment": Row("needs-alignment", needs_alignment, double, change=laid("contiguous", 3)),
    "alignment of rows": Row("needs-alignment", needs_aligned_rows, double, {"dim rows": 3, "dim hidden": 6},
                             change=laid("padded")),
    "tail": Row("tail-mask", drops_tail, double, blocks=(16,)),
    "a tail that is strided by chance": Row("tail-mask", drops_tail, double, blocks=(16,), change=laid("transposed")),
    "a tail at an offset by chance": Row("tail-mask", drops_tail_of_sum, total, change=laid("contiguous", 2),
                                         blocks=(16,)),
    "a tail left out of a sum": Row("tail-mask", drops_tail_of_sum, total, blocks=(16,)),
    "zero in a maximum": Row(
        "wrong-neutral-element", pads_maximum_with_zero, lambda x: x.amax(-1), blocks=(16,), change=valued("negative")
    ),
    "zero in a softmax": Row("wrong-neutral-element", pads_softmax_with_zero, softmax, blocks=(16,)),
    "limit": Row("block-limit", stops_at_limit, double, BIG),
    "a carry": Row("block-limit", misses_carry, lambda x: x.cumsum(1), BIG, blocks=(32,)),
    # The guards hold much the same bits, of which six bytes change: three elements, and no single one.
    "three past the end": Row(
        "out-of-bounds", copies_rows_by_fours, lambda x: x.clone(), {"dim rows": 5, "dim hidden": 1}
    ),
    "a factor": Row("unexplained", triple, double),
    "what a mean divides by": Row("unexplained", mean_by_one_less, lambda x: x.float().mean(-1).to(x.dtype)),
    "a term beside a factor": Row("unexplained", triple_and_one, double),
    "no maximum": Row("missing-max-subtraction", exponentials, softmax, change=valued("huge")),
    "no maximum, hundreds": Row("missing-max-subtraction", exponentials, softmax, change=valued("hundred")),
    "an order of rows": Row("wrong-index-map", swaps_rows, double),
    "one index for all": Row("wrong-index-map", first_row_only, times, inputs=WEIGHTED),
    "neighbours": Row("wrong-index-map", mixes_rows, double),
    "epsilon": Row("eps-misplaced", norm_with_eps_outside, norm, inputs=EPS, change=valued("small")),
    "floor": Row("eps-misplaced", scale_with_small_floor, scale, change=valued("small")),
    "an epsilon that no input holds": Row("eps-misplaced", norm_with_constant_inside, norm_of_constant),
    "a small constant that stays": Row("unexplained", norm_with_offset, norm_of_constant),
    "rows of one element, which no epsilon of 0 can norm": Row(
        "unexplained", centred_norm_without_bias, centred_norm, {"dim rows": 3, "dim hidden": 1}, inputs=AFFINE
    ),
    "masked elements in a maximum": Row(
        "wrong-neutral-element", masks_after_maximum, masked_softmax, inputs=MASKED, change=valued("huge"),
        keywords={"dtypes": "float32"},
    ),
    "an exponential of what pads a tile": Row(
        "wrong-neutral-element", pads_exponential_by_product, softmax, {"dim rows": 9, "dim hidden": 1}, blocks=(16,),
        change=valued("hundred"), keywords={"dtypes": "float32"},
    ),
    "another formula past a threshold": Row(
        "unexplained", cuts_at_threshold, torch.nn.functional.softplus, change=valued("hundred")
    ),
    "the odd end of padded rows": Row("tail-mask", pairs_of_odd_width, double, change=laid("padded")),
    "a rounding on the way to float8": Row(
        "cast-order", to_float8_by_bfloat16, to_float8, {"dim rows": 9, "dim hidden": 33},
        keywords={"dtypes": "float32"},
    ),
    "a sum in 16 bits": Row(
        "low-precision-accumulation", sums_in_input_dtype, total,
        {"dim rows": 33, "dim hidden": 513, "dtype": "bfloat16"},
    ),
    "operands in 16 bits": Row("low-precision-accumulation", matmul_in_bfloat16, matmul, MATMUL, inputs=PRODUCT),
    "a difference of squares": Row(
        "low-precision-accumulation", naive_variance, variance, change=valued("offset"), keywords={"dtypes": "float32"}
    ),
    "NaN": Row("nan-mishandled", relu_beside_nan, torch.relu, change=valued("nan")),
    "NaN in hidden elements": Row("reads-padding", multiplies_mask, hidden_mask, inputs=MASKED, change=valued("nan")),
    "nothing": Row(
        "zero-size", lambda x: total_of_rows(x) + (x.shape[0] == 0), total_of_rows, {"dim rows": 0, "dim hidden": 3}
    ),
    "a structure for nothing": Row("zero-size", fails_when_empty, double, {"dim rows": 0, "dim hidden": 3}),
    "a tail where nothing is left too": Row(
        "tail-mask", lambda x: drops_tail_of_sum(x) + (x.shape[1] % 16 == 0) * 0 if x.shape[1] else total(x) + 1, total,
        {"dim rows": 3, "dim hidden": 0}, blocks=(16,),
    ),
    "an earlier call's weight": Row("cached-answer", caching(), times, inputs=WEIGHTED),
    "another formula": Row("unexplained", wrong_gelu, torch.nn.functional.gelu),
    "a sign": Row("unexplained", negated, double),
    "another formula, strided by chance": Row(
        "unexplained", wrong_gelu, torch.nn.functional.gelu, change=laid("transposed")
    ),
    "a sign in 16 bits": Row(
        "unexplained", negated, double, {"dim rows": 3, "dim hidden": 5, "dtype": "bfloat16"}
    ),
    "a sign where NaN is drawn by chance": Row("unexplained", negated, double, change=valued("nan")),
    "another dtype": Row("wrong-dtype", lambda x: x.double(), double),
    "an input written": Row("mutates-input", lambda x: x.mul_(2) + 0, double),
}  # fmt: skip


@sweep("name", TABLE, fast=first_of_each(TABLE, lambda name: TABLE[name].cause))
def test_experiments_name_the_cause(lab_of: Any, name: str) -> None:
    """Each row is a kernel that is wrong in one way, on a case as a shrinker may leave it, and its cause."""
    row = TABLE[name]
    lab = lab_of(row.fused, row.reference, row.inputs, row.choice, blocks=row.blocks, change=row.change, **row.keywords)
    found = diagnose(lab)
    assert found.cause == row.cause, found
    assert found.cause in CAUSES
    assert not [said for said in found.ruled_out if "could not run" in said], found.ruled_out
    assert found.evidence or found.cause in ("unexplained", "wrong-dtype", "mutates-input")
    assert found.ruled_out or found.cause != "unexplained"


def test_the_evidence_says_what_was_seen(lab_of: Any) -> None:
    """For a stride that is ignored: the copy that cures it, and what was read instead."""
    found = diagnose(lab_of(assumes_contiguous, double, ROWS, PLAIN, change=laid("padded")))
    assert found.evidence == [
        "right on contiguous copies of the same values, for 4 seeds",
        "equals the reference on the storage of x read as contiguous",
    ]


def test_without_a_budget_nothing_is_named(lab_of: Any) -> None:
    """One run is no evidence: the cause is unexplained, and the report says why."""
    found = diagnose(lab_of(drops_tail, double, ROWS, PLAIN, blocks=(16,), max_runs=1))
    assert found.cause == "unexplained"
    assert found.evidence == ["the experiments stopped at their limit, after 1 runs"]
    assert found.ruled_out == []


def test_a_failure_that_does_not_come_back_is_not_explained(lab_of: Any) -> None:
    """A kernel that was wrong once and is right from then on."""
    calls: list[int] = []

    def fused(x: T) -> T:
        calls.append(1)
        return double(x) if len(calls) > 4 else negated(x)

    found = diagnose(lab_of(fused, double, ROWS, PLAIN))
    assert found.cause in ("unexplained", "cached-answer", "nondeterministic")
    assert found.cause != "unexplained" or found.ruled_out


def test_a_rule_that_breaks_leaves_the_others_their_turn(lab_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one rule raises is noted and the failure is explained by the next."""
    from pytest_fusion.diagnosis import diagnose as module

    def broken(lab: Any) -> None:
        raise NotImplementedError("not for float4")

    monkeypatch.setitem(module._RULES, "values", (broken, *module._OF_VALUES))
    found = diagnose(lab_of(drops_tail, double, ROWS, PLAIN, blocks=(16,)))
    assert found.cause == "tail-mask"
    assert "broken: could not run (NotImplementedError: not for float4)" in found.ruled_out


def test_every_variant_runs_once_within_the_budget(lab_of: Any) -> None:
    """The kernel is never asked the same thing twice, and no more often than allowed."""
    lab = lab_of(wrong_gelu, torch.nn.functional.gelu, ROWS, PLAIN, max_runs=25)
    first = lab.attempt(lab.base)
    runs = lab.runs
    assert lab.attempt(lab.base) is first
    assert lab.runs == runs
    diagnose(lab)
    assert lab.runs == 25
