"""Honest kernels round elsewhere than the reference: contracted products, other constants, accumulators with a bias."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_fusion.oracle import run_lanes
from tests.oracle import judging
from tests.sweeps import sweep

Function = Callable[[Tensor], Tensor]


def judged(reference: Function, got: Tensor, x: Tensor, seed: int) -> bool:
    return judging.judged(got, lambda: reference(x), seed)


def fma(a: Tensor, b: float, c: Tensor) -> Tensor:
    """``a * b + c`` of float32, rounded once: the product of two float32 is exact in float64."""
    return (a.double() * torch.tensor(b).double() + c.double()).float()


@pytest.mark.parametrize("seed", range(4))
def test_a_contracted_product_is_no_error(seed: int) -> None:
    """``x * s - max(x * s)`` is a rounding error at the largest element on a GPU and 0 in the reference."""
    x = torch.randn(16, 33, generator=torch.Generator().manual_seed(seed))

    def below(x: Tensor) -> Tensor:
        score = x * 0.3
        return score - score.amax(-1, keepdim=True)

    contracted = fma(x, 0.3, -(x * 0.3).amax(-1, keepdim=True))
    assert bool((contracted[below(x) == 0] != 0).any())
    assert judged(below, contracted, x, seed)


@pytest.mark.parametrize("seed", range(4))
def test_more_than_a_rounding_error_is_an_error(seed: int) -> None:
    """What is left of a product that was stored in bfloat16 is 2^16 times that."""
    x = torch.randn(16, 33, generator=torch.Generator().manual_seed(seed))

    def below(x: Tensor) -> Tensor:
        score = x * 0.3
        return score - score.amax(-1, keepdim=True)

    assert not judged(below, x * 0.3 - (x * 0.3).bfloat16().float().amax(-1, keepdim=True), x, seed)


def test_inputs_cancel_exactly() -> None:
    """No rounding precedes ``x - max(x)``: a kernel that has anything but 0 there is wrong."""
    x = torch.randn(16, 33, generator=torch.Generator().manual_seed(0))

    def below(x: Tensor) -> Tensor:
        return x - x.amax(-1, keepdim=True)

    assert judged(below, below(x), x, 0)
    assert not judged(below, torch.where(below(x) == 0, 2**-26, below(x)), x, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_two_forms_of_a_weighted_mean_agree(seed: int) -> None:
    """``0.9 * a + 0.1 * b`` and ``a + 0.1 * (b - a)`` hold other constants, which shows where the sum is near 0."""
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(65537, generator=generator), torch.randn(65537, generator=generator).bfloat16().float()

    assert judged(lambda a: 0.9 * a + 0.1 * b, torch.lerp(a, b, 0.1), a, seed)
    assert judged(lambda a: torch.lerp(a, b, 0.1), 0.9 * a + 0.1 * b, a, seed)
    assert not judged(lambda a: 0.9 * a + 0.1 * b, 0.9 * a + 0.100001 * b, a, seed)


AVERAGES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "add": lambda v, g, b: (v * b).add(g, alpha=1 - b),
    "addcmul": lambda v, g, b: (v * b).addcmul(g, g, value=1 - b),
    "mul": lambda v, g, b: b * v + (1 - b) * g,
    "the rest first": lambda v, g, b: (1 - b) * g + b * v,
    "lerp": lambda v, g, b: v.lerp(g, 1 - b),
}


@pytest.mark.parametrize("b", [0.9, 0.99, 0.999, 0.9999])
@pytest.mark.parametrize("form", AVERAGES)
def test_what_is_left_of_one_may_be_computed_in_float32(form: str, b: float) -> None:
    """Kernels of Adam are given ``beta`` alone: ``1 - 0.999`` is off by 1.3e-5 there, which was 4 times too much."""
    generator = torch.Generator().manual_seed(1)
    v, g = torch.rand(60, generator=generator) * 0.1, torch.randn(60, generator=generator)
    held = torch.tensor(b)
    term = g * g if form == "addcmul" else g

    def reference(v: Tensor) -> Tensor:
        return AVERAGES[form](v, g, b)

    assert judged(reference, held * v + (1 - held) * term, v, 0)
    assert not judged(reference, held * v + (1 - held) * 1.001 * term, v, 0)


def test_a_small_number_by_itself_is_held_to_a_rounding() -> None:
    """Beside 0.999 alone the rest of 1 is computed of it: 0.001 that belongs to nothing is off by half a unit."""
    x = torch.randn(60, generator=torch.Generator().manual_seed(1))

    assert judged(lambda x: x * 0.001, x * 0.001, x, 0)
    assert not judged(lambda x: x * 0.001, x * (1 - torch.tensor(0.999)), x, 0)


@pytest.mark.parametrize("seed", range(12))
def test_a_scaled_product_rounds_twice_and_its_number_once(seed: int) -> None:
    """``addcmul`` of Adam's second moment beside ``(1 - beta) * g * g``: honest float32 was 1.3 times too far off."""
    generator = torch.Generator().manual_seed(seed)
    v, g, d = (torch.randn(16, generator=generator) for _ in range(3))
    g, d = 100 * g, d.square() + 0.1

    def second(g: Tensor) -> Tensor:
        return (v * 0.95).addcmul(g, g, value=0.05)

    def step(g: Tensor) -> Tensor:
        return v.addcdiv(g, d, value=-0.3)

    assert judged(second, 0.95 * v + 0.05 * g * g, g, seed)
    assert judged(second, 0.95 * v + (g * g) * 0.05, g, seed)
    assert judged(step, v - (0.3 * g) / d, g, seed)
    assert judged(step, v - 0.3 * (g / d), g, seed)
    assert judged(lambda g: torch.add(v, g, alpha=-0.3), v - 0.3 * g, g, seed)
    assert not judged(second, 0.95 * v + 0.0500004 * g * g, g, seed)
    assert not judged(step, v - (0.300002 * g) / d, g, seed)


# Each operation of torch, as kernels write it, and what is wrong by some 2^-20.
WRITTEN: dict[str, tuple[Function, Function]] = {
    "hypot": (lambda x: torch.hypot(x, x + 1), lambda x: (x * x + (x + 1) * (x + 1)).sqrt()),
    "xlogy": (lambda x: torch.xlogy(x, x.abs()), lambda x: x * (x.abs().log2() * math.log(2))),
    "deg2rad": (torch.deg2rad, lambda x: x * math.pi / 180),
    "rad2deg": (torch.rad2deg, lambda x: x * 180 / math.pi),
    "hardsigmoid": (F.hardsigmoid, lambda x: (x * (1 / 6) + 0.5).clamp(0, 1)),
    "hardswish": (F.hardswish, lambda x: x * (x * (1 / 6) + 0.5).clamp(0, 1)),
    "addr": (lambda x: torch.addr(x, x[0], x[0], alpha=0.3), lambda x: x + (0.3 * x[0])[:, None] * x[0]),
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("seed", range(3))
def test_an_operation_as_kernels_write_it(name: str, seed: int) -> None:
    """More roundings than one are no error, and an error of three bits is one."""
    function, written = WRITTEN[name]
    x = 2 * torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
    assert judged(function, written(x), x, seed)
    assert not judged(function, written(x) * (1 + 2**-20), x, seed)


@pytest.mark.parametrize("seed", range(2))
def test_integers_scale_exactly(seed: int) -> None:
    """No kernel rounds them, so one that is off by one is wrong."""
    n = torch.randint(1 << 30, (65537,), generator=torch.Generator().manual_seed(seed))

    def scaled(n: Tensor) -> Tensor:
        return torch.add(torch.addcmul(n, n, n, value=3), n, alpha=7)

    assert judged(scaled, scaled(n), n, seed)
    assert not judged(scaled, scaled(n) + 1, n, seed)


@pytest.mark.parametrize("scale", [0.3, 0.125])
def test_a_contracted_score_overflows_where_it_is_huge(scale: float) -> None:
    """exp2(fma(x, scale * log2 e, -max)) is infinite near 2^60, whose last bit is 2^36; of small scores it is right."""
    x = torch.randn(8, 33, generator=torch.Generator().manual_seed(0))
    factor = float(torch.tensor(scale * 1.4426950408889634))

    def softmax(x: Tensor) -> Tensor:
        score = x * factor
        power = torch.exp2(fma(x, factor, -score.amax(-1, keepdim=True)))
        return power / power.sum(-1, keepdim=True)

    huge = softmax(x * 2.0**60)
    assert bool(huge.isnan().any())
    assert judged(lambda x: torch.softmax(x * scale, -1), huge, x * 2.0**60, 0)
    assert judged(lambda x: torch.softmax(x * scale, -1), softmax(x), x, 0)
    assert not judged(lambda x: torch.softmax(x * scale, -1), torch.full_like(x, torch.nan), x, 0)


@pytest.mark.parametrize("size", [1.0, 100.0, 2.0**60])
def test_scores_may_be_scaled_for_powers_of_two_before_the_largest_is_taken_away(size: float) -> None:
    """Of given scores too: in 16 cases of hundreds such a softmax, interpreted, was off by 4 times what was allowed."""
    x = size * torch.randn(40, 32, generator=torch.Generator().manual_seed(2))

    def powers(score: Tensor) -> tuple[Tensor, Tensor]:
        score = score * 1.4426950408889634
        top = score.amax(-1, keepdim=True)
        return torch.exp2(score - top), top.squeeze(-1)

    power, top = powers(x)
    whole = power.sum(-1, keepdim=True)
    share, log = power / whole, (top + whole.squeeze(-1).log2()) / 1.4426950408889634
    coarse = powers(x.bfloat16().float())[0]
    for softmax in (lambda x: torch.softmax(x, -1), written_softmax):
        assert judged(softmax, share, x, 0)
        assert not judged(softmax, torch.full_like(x, torch.nan), x, 0)
        if size < 2.0**60:
            assert not judged(softmax, coarse / coarse.sum(-1, keepdim=True), x, 0)
    assert judged(lambda x: torch.logsumexp(x, -1), log, x, 0)


def written_softmax(x: Tensor) -> Tensor:
    power = torch.exp(x - x.max(-1)[0][:, None])
    return power / power.sum(-1, keepdim=True)


def test_the_difference_itself_is_held_to_its_own_rounding() -> None:
    """As a result; what an exponential reads of it may be a rounding off at the size of what was given."""
    x = 100 * torch.randn(40, 32, generator=torch.Generator().manual_seed(2))

    def below(x: Tensor) -> Tensor:
        return x - x.amax(-1, keepdim=True)

    assert judged(below, below(x), x, 0)
    assert not judged(below, below(x) * (1 + 2**-20), x, 0)


@pytest.mark.parametrize("form", ["linear", "matmul", "two sums"])
@pytest.mark.parametrize("seed", range(6))
def test_an_accumulator_may_begin_with_the_bias(seed: int, form: str) -> None:
    """One fused multiply-add after the other on top of a large bias rounds at its magnitude in every step."""
    generator = torch.Generator().manual_seed(seed)
    inner = (3, 65, 300)[seed % 3]
    x, weight = torch.randn(33, inner, generator=generator), torch.randn(29, inner, generator=generator)
    bias = torch.randn(29, generator=generator) * (100.0, 1e4)[seed % 2]
    total = bias.expand(33, 29).clone()
    for k in range(inner):
        total = (total.double() + x[:, k, None].double() * weight[None, :, k].double()).float()

    def reference(x: Tensor) -> Tensor:
        if form == "two sums":
            return (x @ weight.T + 1) + (bias - 1)
        return torch.nn.functional.linear(x, weight, bias) if form == "linear" else x @ weight.T + bias

    assert judged(reference, total, x, seed)
    assert not judged(reference, (x @ weight.T).bfloat16().float() + bias, x, seed)


@pytest.mark.parametrize("seed", range(6))
def test_a_score_that_is_computed_twice_is_rounded_twice(seed: int) -> None:
    """Of one key the weight is 1; where two threads contract the score differently it is off by a unit of the score."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 24, 2, generator=generator) * torch.tensor([1.0, 200.0])[:, None, None]
    v = torch.randn(24, 2, generator=generator)
    scores = [
        fma(q[:, c], 1.0, q[:, 1 - c] * 0).double() * k[:, c].double() + (q[:, 1 - c] * k[:, 1 - c]).double()
        for c in (0, 1)
    ]
    first, second = (score.float() * 2**-0.5 for score in scores)
    got = v * torch.exp(second - first)[:, None]
    assert bool((got != v).any())

    def reference(v: Tensor) -> Tensor:
        score = torch.bmm(q[:, None], k[:, :, None]) * 2**-0.5
        return torch.bmm(score.softmax(-1), v[:, None])[:, 0]

    assert judged(reference, got, v, seed)
    assert not judged(reference, v.bfloat16().float(), v, seed)
    assert not judged(lambda v: v.softmax(-1) + v, v * 0 + got, v, seed)


@pytest.mark.parametrize("form", ["sum", "mean", "cumsum", "matmul"])
@pytest.mark.parametrize("seed", range(6))
def test_equal_terms_err_alike(seed: int, form: str) -> None:
    """Added one after the other they drift: each step misses the grid by the same."""
    generator = torch.Generator().manual_seed(seed)
    terms = (57, 300, 1000)[seed % 3]
    x = torch.randn(65, 1, generator=generator).expand(65, terms)
    ones = torch.full((terms, 2), 0.3)
    total, steps = torch.zeros(65), []
    for k in range(terms):
        total = total + x[:, k] if form != "matmul" else fma(x[:, k], 0.3, total)
        steps.append(total)
    forms: dict[str, tuple[Function, Tensor]] = {
        "sum": (lambda x: x.sum(-1), total),
        "mean": (lambda x: x.mean(-1), total / terms),
        "cumsum": (lambda x: x.cumsum(-1), torch.stack(steps, -1)),
        "matmul": (lambda x: x @ ones, total[:, None].expand(65, 2)),
    }
    reference, got = forms[form]

    assert judged(reference, got, x, seed)
    assert not judged(reference, got * (1 - 0.5 / terms), x, seed)


def scanned(x: Tensor) -> Tensor:
    """Products of each prefix of ``x`` (rows, n): each step multiplies what lies twice as far apart."""
    apart = 1
    while apart < x.shape[1]:
        x = torch.cat([x[:, :apart], x[:, apart:] * x[:, :-apart]], 1)
        apart *= 2
    return x


@pytest.mark.parametrize("rows", [1, 65])
@pytest.mark.parametrize("seed", range(4))
def test_equal_factors_err_alike(seed: int, rows: int) -> None:
    """A tree squares them: what one of its levels rounds off is the same in all of that level's nodes."""
    x = (1 + 0.02 * torch.rand(rows, 1, generator=torch.Generator().manual_seed(seed))).expand(rows, 512)
    got = scanned(x)

    assert judged(lambda x: x.cumprod(-1), got, x, seed)
    assert judged(lambda x: x.prod(-1), got[:, -1], x, seed)
    assert not judged(lambda x: x.cumprod(-1), got * (1 + 1e-3), x, seed)
    assert not judged(lambda x: x.prod(-1), got[:, -1] * (1 + 1e-3), x, seed)


def test_different_factors_and_powers_of_two_do_not() -> None:
    """So many units are no accident where factors differ, and none where no product of them is rounded."""
    x = 1 + 0.02 * torch.rand(65, 512, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(65, 512)

    assert not judged(lambda x: x.cumprod(-1), scanned(x) * (1 + 2.0**-16), x, 0)
    assert not judged(lambda x: x.prod(-1), ones.prod(-1) * (1 + 2.0**-16), ones, 0)


def test_different_terms_do_not() -> None:
    """A drift of so many units is no accident where terms differ."""
    x = torch.randn(65, 1000, generator=torch.Generator().manual_seed(0)).abs()

    assert not judged(lambda x: x.sum(-1), x.sum(-1) * (1 + 2.0**-18), x, 0)


@pytest.mark.parametrize("seed", range(4))
def test_what_cancellation_leaves_may_be_biased(seed: int) -> None:
    """Of one column, 1 - (x / rms)^2 is some 1e-6: what is rounded to the neighbour of 1 is the same for many rows."""
    x = torch.randn(9255, 1, generator=torch.Generator().manual_seed(seed))
    g = torch.randn(9255, 1, generator=torch.Generator().manual_seed(seed + 100))

    def reference(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return torch.autograd.grad(y, x, g)[0]

    scale = 1 / (x * x + 1e-6).sqrt()
    normed = x * scale
    got = scale * (g - normed * (g * normed))

    assert judged(reference, got, x, seed)
    assert not judged(reference, scale * (g - normed * (g * normed) * (1 - 1e-5)), x, seed)


@pytest.mark.parametrize("inner", [4, 64])
@pytest.mark.parametrize("seed", range(6))
def test_equal_products_on_a_bias_err_alike(seed: int, inner: int) -> None:
    """Each of them is added at the bias's magnitude, and misses the grid there by the same."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 1, generator=generator).expand(7, inner)
    weight = torch.randn(20, 1, generator=generator).mul(0.01).expand(20, inner)
    bias = torch.randn(20, generator=generator)
    total = bias.expand(7, 20).clone()
    for k in range(inner):
        total = (total.double() + x[:, k, None].double() * weight[None, :, k].double()).float()

    assert judged(lambda x: torch.nn.functional.linear(x, weight, bias), total, x, seed)
    assert judged(lambda x: x @ weight.T + bias, total, x, seed)
    assert not judged(lambda x: x @ weight.T + bias, total * (1 + 2.0**-12), x, seed)


def test_a_mean_by_updates_of_an_infinite_value_is_nan() -> None:
    """``mean += (x - mean) / count`` goes on with ``inf - inf``; of other rows and of squares it does not."""
    x = torch.randn(4, 65, generator=torch.Generator().manual_seed(0))
    x[1, 3], x[3] = torch.inf, torch.inf
    updated = x.mean(-1)
    updated[1] = updated[3] = torch.nan
    assert judged(lambda x: x.mean(-1), updated, x, 0)
    assert judged(lambda x: x.mean(-1), x.mean(-1), x, 0)
    updated[2] = torch.nan
    assert not judged(lambda x: x.mean(-1), updated, x, 0)
    squares = x.square().mean(-1)
    squares[1] = torch.nan
    assert not judged(lambda x: x.square().mean(-1), squares, x, 0)
    pairs = torch.tensor([[torch.inf, 1.5], [2.0, 1.0]])
    assert judged(lambda x: x.mean(-1), torch.tensor([torch.nan, 1.5]), pairs, 0)
    assert not judged(lambda x: (x * x).mean(-1), torch.tensor([torch.nan, 2.5]), pairs, 0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("width", [1, 4, 33])
def test_a_cancelled_difference_may_be_multiplied_out(width: int, seed: int) -> None:
    """``x * s - mean * s`` is ``(x - mean) * s`` with other roundings, also of a single value; a low mean is not."""
    x = 1000 + torch.randn(16, width, generator=torch.Generator().manual_seed(seed))
    mean = x.mean(-1, keepdim=True)

    def scaled(x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) * 316.2

    assert judged(scaled, fma(x, 316.2, -(mean * 316.2)), x, seed)
    assert not judged(scaled, (x - (mean * (1 + 2**-19))) * 316.2, x, seed)


def test_a_difference_that_is_the_result_is_exact() -> None:
    """Nothing multiplies it: of a mean that has no error every element of ``x - mean`` is known."""
    x = 1000 + torch.tensor([[-2.0, 2.0, -1.0, 1.0]]).repeat(16, 1)

    def centred(x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    assert judged(centred, centred(x), x, 0)
    assert not judged(centred, centred(x) + 2**-10, x, 0)


def test_a_product_of_bools_is_bool() -> None:
    """``isfinite`` is one, and a choice by it is followed."""
    x = torch.tensor([1.0, float("inf"), 3.0])
    found = run_lanes(lambda: [torch.where(torch.isfinite(x * 1.5), x * 1.5, 0.0)], lanes=6, kind="E", seed=0)
    assert found.fallbacks == ()
    assert found.outputs[0].oracle.tolist() == [1.5, 0.0, 4.5]


def shares_of_squares(x: Tensor) -> Tensor:
    squares = x * x
    return squares / squares.sum(-1, keepdim=True)


@pytest.mark.parametrize("seed", range(4))
def test_a_kernel_that_gets_through_where_the_reference_overflows_is_priced(seed: int) -> None:
    """It may have the digits of float16 arithmetic without float16's range; a hundredth more is still an error."""
    x = torch.rand(16, 33, generator=torch.Generator().manual_seed(seed)).mul_(300).add_(300).half()
    assert bool(shares_of_squares(x).isnan().all())
    squares = (x.float().square() / 1024).half()
    scores = squares.float() / squares.float().sum(-1, keepdim=True).half().float()
    assert judged(shares_of_squares, scores.half(), x, seed)
    assert not judged(shares_of_squares, (scores * 1.01).half(), x, seed)


@pytest.mark.parametrize("seed", range(4))
def test_what_gets_through_huge_scores_is_priced(seed: int) -> None:
    """Equal columns of a product may differ by a unit, which at 1e18 is 1e11; an exponential of that is infinite."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)).mul_(1e18)
    weight = torch.randn(1, 8, generator=torch.Generator().manual_seed(seed + 100)).expand(5, 8)

    def losses(x: Tensor) -> Tensor:
        scores = x @ weight.t()
        return (torch.logsumexp(scores, -1) - scores[:, 3]).mean(0, keepdim=True)

    other = (x @ weight[:1].t()).expand(6, 5).clone()
    other[:2, 1] = torch.nextafter(other[:2, 1], torch.tensor(-torch.inf))
    assert judged(losses, (torch.logsumexp(other, -1) - other[:, 3]).mean(0, keepdim=True), x, seed)
    assert judged(losses, torch.tensor([5.0]).log(), x, seed)


@sweep("dtype", [torch.float32, torch.bfloat16])
@sweep("lowest", [-88.7228, -87.3365])
def test_a_gate_that_a_gpu_flushes_is_no_error(lowest: float, dtype: torch.dtype) -> None:
    """``silu`` is -0 where ``exp(-x)`` overflows or a GPU flushes the gate; above that it is not."""
    x = torch.randn(64, 2080, generator=torch.Generator().manual_seed(0)) * 560

    def flushed(below: float) -> Tensor:
        return torch.where(x < below, -0.0, torch.nn.functional.silu(x.double())).to(dtype)

    def silu(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x).to(dtype)

    assert judged(silu, flushed(lowest), x, 0)
    assert not judged(silu, flushed(-87.0), x, 0)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("columns", [2, 3, 4])
def test_a_mean_may_be_updated_value_by_value(columns: int, seed: int) -> None:
    """Welford's mean rounds differences: of rows 8 and -8 those of 16, where their sum is almost 0."""
    x = 8 * torch.randn(31, columns, generator=torch.Generator().manual_seed(seed))
    x[:, 1] = 0.01 - x[:, 0]
    mean = torch.zeros(31)
    for at in range(columns):
        mean = mean + (x[:, at] - mean) / (at + 1)
    assert judged(lambda x: x.mean(-1), mean, x, seed)
    assert judged(lambda x: torch.var_mean(x, -1)[1], mean, x, seed)
    assert not judged(lambda x: x.mean(-1), mean + 2**-20 * x[:, 0].abs(), x, seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("columns", [3, 4, 5, 8])
def test_a_mean_may_be_combined_in_pairs(columns: int, seed: int) -> None:
    """Halves against each other by their weights, as reductions have it: many rows show what each step rounds."""
    x = torch.randn(400, columns, generator=torch.Generator().manual_seed(seed))
    mean, weight = torch.zeros(400, 8), torch.zeros(400, 8)
    mean[:, :columns], weight[:, :columns] = x, 1.0
    while mean.shape[1] > 1:
        (a, b), (m, n) = mean.chunk(2, 1), weight.chunk(2, 1)
        mean, weight = a + (b - a) * torch.where(m + n > 0, n / (m + n), 0.0), m + n
    assert judged(lambda x: x.mean(-1), mean[:, 0], x, seed)
    assert not judged(lambda x: x.mean(-1), mean[:, 0] + 2**-21 * x[:, 0].abs(), x, seed)
