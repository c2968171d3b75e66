"""Planted kernels and the causes that experiments name, beside look-alikes for which another must be named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from pytest_fusion.case import numbers
from pytest_fusion.case.model import Case, Layout
from pytest_fusion.diagnosis.causes import CAUSES
from pytest_fusion.diagnosis.diagnose import diagnose
from pytest_fusion.spec.inputs import derived, tensor
from pytest_fusion.verdict import gradients

T = torch.Tensor
ROWS = {"x": tensor("rows hidden")}
PLAIN = {"dim rows": 3, "dim hidden": 5}
BIG = {"dim rows": 5, "dim hidden": 33}


def laid(kind: str, offset: int = 0, variant: int = 0, name: str = "x") -> Callable[[Case], Case]:
    return lambda case: case.with_tensor(name, layout=Layout(kind, offset, variant))


def valued(regime: str, dtype: str = "") -> Callable[[Case], Case]:
    def change(case: Case) -> Case:
        for name in case.tensors:
            case = case.with_tensor(name, regime=regime, **({"dtype": dtype} if dtype else {}))
        return case.with_(dtype=dtype or case.dtype)

    return change


def double(x: T) -> T:
    return x * 2


def softmax(x: T) -> T:
    return torch.softmax(x.float(), -1).to(x.dtype)


def total(x: T) -> T:
    return x.float().sum(-1).to(x.dtype)


def assumes_contiguous(x: T) -> T:
    """Reads as many elements as there are from where the tensor begins, and from there again if there are too few."""
    there = x.untyped_storage().size() // x.element_size() - x.storage_offset()
    flat = torch.as_strided(x, (there,), (1,), x.storage_offset())
    return double(flat[torch.arange(x.numel()) % there].reshape(x.shape)) if x.numel() else double(x)


def assumes_rows_far_apart(x: T) -> T:
    return double(x) if x.stride(0) or x.shape[0] < 2 else torch.zeros_like(x)


def starts_at_storage(x: T) -> T:
    return double(torch.as_strided(x, x.shape, x.stride(), 0))


def needs_alignment(x: T) -> T:
    return double(x) if x.storage_offset() * x.element_size() % 16 == 0 else torch.zeros(x.shape, dtype=x.dtype)


def needs_aligned_rows(x: T) -> T:
    return double(x) if x.is_contiguous() or x.stride(0) % 4 == 0 else torch.zeros(x.shape, dtype=x.dtype)


def drops_tail(x: T, tile: int = 16) -> T:
    whole = x.shape[1] // tile * tile
    return torch.cat([x[:, :whole] * 2, x[:, whole:]], 1)


def drops_tail_of_sum(x: T) -> T:
    return total(x[:, : x.shape[1] // 16 * 16])


def pads_maximum_with_zero(x: T) -> T:
    if x.shape[1] % 16 == 0:
        return x.amax(-1)
    return torch.cat([x, x.new_zeros(x.shape[0], 1)], 1).amax(-1)


def pads_softmax_with_zero(x: T) -> T:
    pad = -x.shape[1] % 16
    wide = torch.cat([x, x.new_zeros(x.shape[0], pad)], 1) if x.shape[0] else x
    return softmax(wide)[:, : x.shape[1]].contiguous()


def stops_at_limit(x: T) -> T:
    return torch.cat([x[:, :32] * 2, torch.zeros_like(x[:, 32:])], 1)


def misses_carry(x: T) -> T:
    return torch.cat([part.cumsum(1) for part in x.split(32, 1)], 1) if x.shape[1] else x.clone()


def skips_last(x: T) -> T:
    out = x * 2
    out[:, -1:] = 0
    return out


def sums_all_but_last(x: T) -> T:
    return total(x[:, :-1])


def exponentials(x: T) -> T:
    weight = x.float().exp()
    return (weight / weight.sum(-1, keepdim=True)).to(x.dtype)


def swaps_rows(x: T) -> T:
    return (x * 2).flip(0)


def first_row_only(x: T, w: T) -> T:
    return x * w[:, :1]


def mixes_rows(x: T) -> T:
    out = x * 2
    out[1:] += x[:1]
    return out


def norm(x: T, eps: float) -> T:
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def norm_with_eps_outside(x: T, eps: float) -> T:
    return (x.float() / (x.float().square().mean(-1, keepdim=True).sqrt() + eps)).to(x.dtype)


def scale(x: T) -> T:
    return x.float() / x.float().abs().amax(-1, keepdim=True).clamp(min=0.01)


def scale_with_small_floor(x: T) -> T:
    return x.float() / x.float().abs().amax(-1, keepdim=True).clamp(min=1e-7)


def norm_of_constant(x: T) -> T:
    return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-3)


def norm_of_epsilon(x: T) -> T:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def norm_with_epsilon_divided(x: T) -> T:
    return x / ((x.square().sum(-1, keepdim=True) + 1e-6) / x.shape[-1]).sqrt()


def norm_with_constant_inside(x: T) -> T:
    return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()


def norm_with_offset(x: T) -> T:
    return norm_of_constant(x) + 1e-3


def centred_norm(x: T, w: T, b: T, eps: float) -> T:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], w, b, eps)


def centred_norm_without_bias(x: T, w: T, b: T, eps: float) -> T:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], w, None, eps)


def masked_softmax(x: T, keep: T) -> T:
    return torch.softmax(x.masked_fill(~keep, -torch.inf), -1)


def masks_after_maximum(x: T, keep: T) -> T:
    weight = (x - x.amax(-1, keepdim=True)).exp() * keep
    return weight / weight.sum(-1, keepdim=True)


def pads_exponential_by_product(x: T) -> T:
    """0 stands in the lanes that pad the last tile, and is taken away from a maximum that it is no part of."""
    pad = -x.shape[1] % 16
    wide = torch.cat([x, x.new_zeros(x.shape[0], pad)], 1)
    weight = (wide - x.amax(-1, keepdim=True)).exp() * (torch.arange(wide.shape[1]) < x.shape[1])
    return (weight / weight.sum(-1, keepdim=True))[:, : x.shape[1]].contiguous()


def cuts_at_threshold(x: T) -> T:
    return torch.where(x <= 20.0, torch.nn.functional.softplus(x), 0.0)


def pairs_of_odd_width(x: T) -> T:
    out = double(x)
    return out if x.is_contiguous() or x.shape[1] % 2 == 0 else out.index_fill(1, torch.tensor([x.shape[1] - 1]), 0)


def to_float8(x: T) -> T:
    return x.to(torch.float8_e4m3fn)


def to_float8_by_bfloat16(x: T) -> T:
    return x.to(torch.bfloat16).to(torch.float8_e4m3fn)


def sums_in_input_dtype(x: T) -> T:
    acc = torch.zeros(x.shape[0], dtype=x.dtype)
    for column in x.unbind(1):
        acc = acc + column
    return acc


def affine(x: T) -> T:
    return ((x.float() * 1.7) * 0.9).to(x.dtype)


def affine_cast_between(x: T) -> T:
    return ((x.float() * 1.7).to(x.dtype).float() * 0.9).to(x.dtype)


def matmul(x: T, w: T) -> T:
    return x @ w


def matmul_in_bfloat16(x: T, w: T) -> T:
    return (x.to(torch.bfloat16).float() @ w.to(torch.bfloat16).float()).to(x.dtype)


def variance(x: T) -> T:
    return x.var(-1, correction=0)


def naive_variance(x: T) -> T:
    return x.square().mean(-1) - x.mean(-1).square()


def relu_without_nan(x: T) -> T:
    return torch.where(x > 0, x, 0.0)


def fails_when_empty(x: T) -> T:
    return double(x) if x.numel() else torch.full((x.shape[1],), 3.0, dtype=x.dtype)


def mean_rows(x: T) -> T:
    return x.sum(0) / max(x.shape[0], 1)


def wrong_gelu(x: T) -> T:
    return torch.nn.functional.gelu(x, approximate="tanh")


def negated(x: T) -> T:
    return -double(x)


def caching() -> Callable[[T, T], T]:
    kept: dict[Any, T] = {(3, 5): torch.ones(3, 5)}

    def fused(x: T, w: T) -> T:
        return x * kept.setdefault(tuple(w.shape), w.clone())

    return fused


def times(x: T, w: T) -> T:
    return x * w


def hidden_mask(x: T, keep: T) -> T:
    return torch.where(keep, x, 0.0).sum(-1)


def multiplies_mask(x: T, keep: T) -> T:
    return (x * keep).sum(-1)


def second_and_third(rows: int, hidden: int) -> T:
    """Where the NaN of a case is not: those are in the first lane and in the last two."""
    return ((torch.arange(hidden) == 1) | (torch.arange(hidden) == 2)).expand(rows, hidden).contiguous()


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
MATMUL = {"dim rows": 3, "dim inner": 9, "dim cols": 4}

TABLE: dict[str, Row] = {
    "strides": Row("ignores-strides", assumes_contiguous, double, change=laid("transposed")),
    "padded strides": Row("ignores-strides", assumes_contiguous, double, change=laid("padded")),
    "an expanded tensor of a kernel that ignores all strides": Row(
        "ignores-strides", assumes_contiguous, double, change=laid("expanded", 0, 1)
    ),
    "only an expanded tensor": Row("ignores-zero-stride", assumes_rows_far_apart, double, change=laid("expanded")),
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
    "the last index": Row("off-by-one-mask", skips_last, double),
    "the last index of a sum": Row("off-by-one-mask", sums_all_but_last, total),
    "no maximum": Row("missing-max-subtraction", exponentials, softmax, change=valued("huge")),
    "no maximum, hundreds": Row("missing-max-subtraction", exponentials, softmax, change=valued("hundred")),
    "an order of rows": Row("wrong-index-map", swaps_rows, double),
    "one index for all": Row("wrong-index-map", first_row_only, times, inputs=WEIGHTED),
    "neighbours": Row("wrong-index-map", mixes_rows, double),
    "epsilon": Row("eps-misplaced", norm_with_eps_outside, norm, inputs=EPS, change=valued("small")),
    "floor": Row("eps-misplaced", scale_with_small_floor, scale, change=valued("small")),
    "an epsilon that hardly shows in ordinary values": Row(
        "eps-misplaced", norm_with_epsilon_divided, norm_of_epsilon, {"dim rows": 9, "dim hidden": 2},
        keywords={"dtypes": "float32"},
    ),
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
        "low-precision-accumulation", sums_in_input_dtype, total, {"dim rows": 3, "dim hidden": 65, "dtype": "bfloat16"}
    ),
    "a rounding in between": Row(
        "cast-order", affine_cast_between, affine, {"dim rows": 9, "dim hidden": 33, "dtype": "bfloat16"}
    ),
    "operands in 16 bits": Row("low-precision-accumulation", matmul_in_bfloat16, matmul, MATMUL, inputs=PRODUCT),
    "a difference of squares": Row(
        "low-precision-accumulation", naive_variance, variance, change=valued("offset"), keywords={"dtypes": "float32"}
    ),
    "NaN": Row("nan-swallowed", relu_without_nan, torch.relu, change=valued("nan")),
    "NaN in hidden elements": Row("reads-padding", multiplies_mask, hidden_mask, inputs=MASKED, change=valued("nan")),
    "nothing": Row("zero-size", mean_rows, lambda x: x.mean(0), {"dim rows": 0, "dim hidden": 3}),
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
    "another formula in 16 bits": Row(
        "unexplained", negated, double, {"dim rows": 3, "dim hidden": 5, "dtype": "bfloat16"}
    ),
    "another formula where NaN is drawn by chance": Row("unexplained", negated, double, change=valued("nan")),
    "another dtype": Row("wrong-dtype", lambda x: x.double(), double),
    "an input written": Row("mutates-input", lambda x: x.mul_(2) + 0, double),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_experiments_name_the_cause(lab_of: Any, name: str) -> None:
    """Each row is a kernel that is wrong in one way, on a case as a shrinker may leave it, and its cause."""
    row = TABLE[name]
    lab = lab_of(row.fused, row.reference, row.inputs, row.choice, blocks=row.blocks, change=row.change, **row.keywords)
    found = diagnose(lab)
    assert found.cause == row.cause, found
    assert found.cause in CAUSES
    assert not [said for said in found.ruled_out if "could not be asked" in said], found.ruled_out
    assert found.evidence or found.cause in ("unexplained", "wrong-dtype", "mutates-input")
    assert found.ruled_out or found.cause != "unexplained"


def differentiable(backward: Callable[[T, T], T]) -> Callable[[T], T]:
    """``x * x`` with the backward of ``x`` and the upstream gradient."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T) -> T:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, g: T) -> T:
            return backward(*ctx.saved_tensors, g)

    def fused(x: T) -> T:
        return Square.apply(x)  # type: ignore[no-any-return,no-untyped-call]

    return fused


def asks_plainly(seed: int) -> bool:
    """Itself and where a statistical failure is confirmed."""
    fresh = [numbers.mix(seed, "confirm", attempt) >> 1 for attempt in (1, 2)]
    return all(map(gradients.asks_plainly, (seed, *fresh)))


def gradient_of_square(x: T, g: T) -> T:
    return 2 * x * g


def rounded_on_the_way(x: T, g: T) -> T:
    if x.dtype is torch.float32:
        return gradient_of_square(x, g)
    part = 2.6 * x.float()
    for factor in (1.7, 0.3):
        part = part.to(x.dtype).float() * factor
    return (part.to(x.dtype).float() / 0.663 * g.float()).to(x.dtype)


GRADIENTS: dict[str, tuple[str, Callable[[T, T], T], dict[str, Any], Callable[[Case], Case]]] = {
    "strides": (
        "ignores-strides", lambda x, g: gradient_of_square(x, g) if x.is_contiguous() else x.mT.reshape(x.shape) * g,
        PLAIN, laid("transposed"),
    ),
    "tail": (
        "tail-mask", lambda x, g: torch.cat([gradient_of_square(x, g)[:, : (n := x.shape[1] // 16 * 16)],
                                             0 * x[:, n:]], 1), PLAIN, lambda case: case,
    ),
    "a rounding": (
        "cast-order", rounded_on_the_way,
        {"dim rows": 33, "dim hidden": 65, "dtype": "bfloat16"}, lambda case: case,
    ),
    "rows mixed up": (
        "wrong-index-map", lambda x, g: torch.cat([(d := gradient_of_square(x, g))[:1], d[1:] + d[:1]]), PLAIN,
        lambda case: case,
    ),
    "another formula": (
        "unexplained", lambda x, g: x * x * g, PLAIN,
        lambda case: case,
    ),
    "a tail that is strided by chance": (
        "tail-mask", lambda x, g: torch.cat([gradient_of_square(x, g)[:, : (n := x.shape[1] // 16 * 16)],
                                             0 * x[:, n:]], 1), PLAIN, laid("padded"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_experiments_name_what_a_backward_does_wrong(lab_of: Any, name: str) -> None:
    """The same rules, with the gradient in the place of the result."""
    cause, backward, choice, change = GRADIENTS[name]

    def plainly(case: Case) -> Case:
        return change(case.with_(seed=next(filter(asks_plainly, range(1000)))))

    def square(x: T) -> T:
        return x.float().square().to(x.dtype)

    lab = lab_of(differentiable(backward), square, ROWS, choice, change=plainly, blocks=(16,), grad=True)
    assert lab.verdict.check == "gradients"
    found = diagnose(lab)
    assert found.cause == cause, found


def weighted(total_of: Callable[[T], T]) -> Callable[[T, T], T]:
    """``x * w`` whose backward adds up the terms of a 16-bit weight's gradient by ``total_of``."""

    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T, w: T) -> T:
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx: Any, g: T) -> tuple[T, T]:
            x, w = ctx.saved_tensors
            terms = g.float() * x.float()
            return g * w, (terms.sum(0) if w.dtype is torch.float32 else total_of(terms)).to(w.dtype)

    def fused(x: T, w: T) -> T:
        return Weighted.apply(x, w)  # type: ignore[no-any-return,no-untyped-call]

    return fused


@pytest.mark.parametrize(
    ("cause", "total_of"),
    [
        ("low-precision-accumulation", lambda terms: sums_in_input_dtype(terms.mT.to(torch.bfloat16)).float()),
        ("cast-order", lambda terms: (terms.to(torch.bfloat16).float() * 1.7).to(torch.bfloat16).float().sum(0) / 1.7),
    ],
)
def test_a_sum_over_rows_is_told_from_roundings_of_its_terms(
    lab_of: Any, cause: str, total_of: Callable[[T], T]
) -> None:
    """Another order of the rows, and of the upstream gradient with them, changes the first and not the second."""

    def plainly(case: Case) -> Case:
        return case.with_(seed=next(filter(asks_plainly, range(1000))))

    inputs = {"x": tensor("rows hidden"), "w": tensor("hidden")}
    choice = {"dim rows": 65, "dim hidden": 33, "dtype": "bfloat16"}
    lab = lab_of(weighted(total_of), lambda x, w: (x.float() * w.float()).to(x.dtype), inputs, choice,
                 change=plainly, grad=True)  # fmt: skip
    assert lab.verdict.check == "gradients"
    found = diagnose(lab)
    assert found.cause == cause, found


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
    assert "broken: could not be asked (NotImplementedError: not for float4)" in found.ruled_out


def test_every_variant_runs_once_within_the_budget(lab_of: Any) -> None:
    """The kernel is never asked the same thing twice, and no more often than allowed."""
    lab = lab_of(wrong_gelu, torch.nn.functional.gelu, ROWS, PLAIN, max_runs=40)
    first = lab.ask(lab.base)
    runs = lab.runs
    assert lab.ask(lab.base) is first
    assert lab.runs == runs
    diagnose(lab)
    assert lab.runs == 40
