"""Floating outputs: honest kernels pass and wrong ones fail, whatever else the tensor holds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_fusion.oracle import OutputLanes, run_lanes
from pytest_fusion.oracle.tolerance import excess, judge_output
from tests.oracle.tolerance.judging import judged

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def exact_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (normed * weight.double()).to(x.dtype)


@pytest.fixture(params=DTYPES, ids=str)
def case(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
    """16 rows of 256 with a zero row, a tiny row and, where the dtype has them, a huge and a subnormal row."""
    generator = torch.Generator().manual_seed(3)
    dtype = request.param
    x = torch.randn(16, 256, generator=generator)
    x[7] = 0
    x[4] *= 1e-3
    if dtype != torch.float16:
        x[3] *= 1e20
        x[6] *= 1e-39
    return x.to(dtype), (1 + 0.2 * torch.randn(256, generator=generator)).to(dtype)


def test_native_exact_and_flushing_kernels_pass(case: tuple[Tensor, Tensor]) -> None:
    """A huge row that overflows on the way may come out as the reference has it or as it is; subnormals may be zero."""
    x, weight = case
    flushed = torch.where(x.abs() < 2.0**-126, 0.0, x)
    kernels = [rms_norm(x, weight), exact_rms_norm(x, weight), rms_norm(flushed, weight)]

    verdicts = [judged(kernel, lambda: rms_norm(x, weight)) for kernel in kernels]

    assert [v.ok for v in verdicts] == [True] * 3
    assert all(v.ratio < 1 for v in verdicts)


@pytest.mark.parametrize("bug", ["element", "row", "huge row", "nan", "eps"])
def test_one_wrong_element_or_row_is_found_among_odd_rows(case: tuple[Tensor, Tensor], bug: str) -> None:
    """Odd rows do not blind the judge: one element off by 6 %, one row by 3 %, garbage in the huge row, one NaN."""
    x, weight = case
    candidate = rms_norm(x, weight)
    if bug == "element":
        candidate[10, 17] *= 1.06
    elif bug == "row":
        candidate[12] *= 1.03
    elif bug == "huge row":
        candidate[3] = 9.0
    elif bug == "nan":
        candidate[0, 0] = math.nan
    else:
        candidate = rms_norm(x, weight, 1e-5)

    verdict = judged(candidate, lambda: rms_norm(x, weight))

    assert not verdict.ok
    # 6 % of one element are within twice what bfloat16 loses of the largest of its row.
    assert verdict.grade == ("C" if bug == "element" and x.dtype == torch.bfloat16 else "D")
    if bug == "element":
        assert verdict.index == (10, 17)
        assert verdict.mismatched == 1
        assert bool((excess(candidate, _lanes(x, weight)) > 1)[10, 17])
        assert int((excess(candidate, _lanes(x, weight)) > 1).sum()) == 1
    if bug == "nan":
        assert verdict.statistic == "nonfinite"
        assert not verdict.statistical


def _lanes(x: Tensor, weight: Tensor) -> OutputLanes:
    return run_lanes(lambda: [rms_norm(x, weight)], lanes=24, seed=9).outputs[0]


def test_nonfinite_elements_must_match_both_ways(case: tuple[Tensor, Tensor]) -> None:
    """A row with an infinity and a row with a NaN keep theirs; hiding one, or having one too many, fails."""
    x, weight = case
    x = x.clone()
    x[1, 5], x[2, 9] = math.inf, math.nan
    native = rms_norm(x, weight)
    hidden, zeroed, extra = native.clone(), native.clone(), native.clone()
    hidden[2, 9] = 0
    zeroed[1] = 0
    extra[11, 0] = math.inf

    verdicts = [judged(kernel, lambda: rms_norm(x, weight)) for kernel in (native, hidden, zeroed, extra)]

    assert [v.ok for v in verdicts] == [True, False, False, False]
    assert {v.statistic for v in verdicts[1:]} == {"nonfinite"}


def test_finite_rows_are_judged_beside_nan_rows() -> None:
    """One element off by 3 % is found although three quarters of the rows are NaN."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    x[4:] = -math.inf
    good = x.softmax(-1)
    bad = good.clone()
    bad[2, 3] *= 1.03

    verdicts = [judged(kernel, lambda: x.softmax(-1)) for kernel in (good, bad, good.nan_to_num())]

    assert [v.ok for v in verdicts] == [True, False, False]
    assert verdicts[1].index == (2, 3)


def test_overflow_in_low_precision_may_be_avoided_or_followed() -> None:
    """fp16 products beyond 65504 may be infinite as in the reference or, where the final value fits, finite."""
    x = torch.full((4, 32), 300.0, dtype=torch.float16)

    def reference() -> Tensor:
        return (x * x) * torch.tensor(1e-3, dtype=torch.float16)

    followed, avoided = reference(), (x.float() * x.float() * torch.tensor(1e-3).half().float()).half()

    assert bool(torch.isinf(followed).all())
    assert judged(followed, reference).ok
    assert judged(avoided, reference).ok
    assert not judged(avoided * 1.05, reference).ok
    assert not judged(-followed, reference).ok


def test_one_of_two_overflows_that_cancel_may_be_reached_alone() -> None:
    """Of ``base + low @ b`` in fp16 the reference has ``inf - inf``, an unrounded ``base`` one infinity."""
    x = torch.full((4, 32), 300.0, dtype=torch.float16)

    def reference() -> Tensor:
        return x * 300 - x * 302

    one = torch.full_like(x, -math.inf)
    assert bool(torch.isnan(reference()).all())
    assert judged(one, reference).ok
    assert judged((x.float() * 300 - x.float() * 302).half(), reference).ok
    assert not judged(one, lambda: x - x * 3).ok
    assert not judged(one, lambda: x * math.nan).ok


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_degenerate_tensors(dtype: torch.dtype) -> None:
    """All-zero, constant, empty, scalar and transposed outputs are judged without division by zero."""
    zero, weight = torch.zeros(8, 64, dtype=dtype), torch.ones(64, dtype=dtype)
    constant = torch.full((8, 64), 3.3, dtype=dtype)
    scalar = torch.linspace(0, 1, 64).to(dtype)

    assert judged(-zero, lambda: rms_norm(zero, weight)).ok
    assert not judged(zero + 1e-3, lambda: rms_norm(zero, weight)).ok
    assert judged(zero, lambda: F.layer_norm(constant, (64,))).ok
    assert not judged(zero + 1, lambda: F.layer_norm(constant, (64,))).ok
    assert judged(zero[:0], lambda: rms_norm(zero[:0], weight)).ok
    assert judged(scalar.sum(), scalar.sum).ok
    assert not judged(scalar.sum() * 1.1, scalar.sum).ok
    assert judged(constant.t(), lambda: constant.t().contiguous()).ok


def test_exact_zeros_are_no_slack() -> None:
    """A mask off by one leaks 1e-4 of weight where the reference has exactly zero (frexp(0) once granted 2^-8)."""
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    hidden = torch.ones(32, 32, dtype=torch.bool).triu(1)

    def reference() -> Tensor:
        return x.masked_fill(hidden, -math.inf).softmax(-1)

    leaking = reference()
    leaking[5, 6] = 1e-4

    assert not judged(leaking, reference).ok


def test_gelu_tails_keep_their_conditioning() -> None:
    """In the negative tail 1 + erf(x) has an absolute error: float32 kernels there are honest however they differ."""
    x = torch.linspace(-6, -3, 2048).reshape(16, 128)
    by_erfc = 0.5 * x * torch.erfc(-x * math.sqrt(0.5))

    assert judged(F.gelu(x), lambda: F.gelu(x)).ok
    assert judged(by_erfc, lambda: F.gelu(x)).ok
    assert not judged(F.gelu(x, approximate="tanh"), lambda: F.gelu(x)).ok


def test_scalar_loss_of_one_row() -> None:
    """A mean over one row still divides and scales in float32; a loss off by 1e-4 is wrong."""
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(4))
    target = torch.tensor([5])

    def reference() -> Tensor:
        return F.cross_entropy(x, target)

    other = (x.exp().sum().log() - x[0, 5]) * (1 / torch.tensor(1.0))

    assert all(judged(other, reference, seed=s).ok for s in range(10))
    assert not judged(reference() * (1 + 1e-4), reference).ok


def test_exact_answers_pass_where_the_lanes_lean_one_way() -> None:
    """Roundings that all go one way give the lanes a common factor; a kernel without it is right."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(64, 512, generator=generator) * torch.logspace(-4, 3, 64)[:, None]).bfloat16()
    candidate = (x.float().softmax(-1) * x.float()).bfloat16()

    assert all(judged(candidate, lambda: x.softmax(-1) * x, seed=s).ok for s in range(3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_exact_values_use_up_nothing(dtype: torch.dtype) -> None:
    """A copy passes without an error; one element at the next neighbour is looked at like any other."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    copy = judged(x.clone(), lambda: x.relu() - (-x).relu(), strict=True)
    assert (copy.ok, copy.ratio, copy.grade, copy.index, copy.mismatched) == (True, 0.0, "A", (0, 0), 0)
    assert copy.total == x.numel()

    off = x.clone()
    off[3, 5] = torch.nextafter(off[3, 5], torch.tensor(torch.inf, dtype=dtype))
    beside = judged(off, lambda: x.relu() - (-x).relu())
    assert (beside.index, beside.ratio > 0, beside.allowed is not None) == ((3, 5), True, True)
    off[3, 5] = torch.nan
    assert judged(off, lambda: x.relu() - (-x).relu()).statistic == "nonfinite"


def test_double_precision_outputs() -> None:
    """float64 results are held to float64 rounding: another order passes, a float32 detour and 1e-12 fail."""
    x = torch.randn(16, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    native = x.softmax(-1)
    other = x.exp() / torch.stack(list(x.exp().unbind(-1))).sum(0)[:, None]

    assert judged(native, lambda: x.softmax(-1)).ok
    assert judged(other, lambda: x.softmax(-1)).ok
    assert not judged(x.float().softmax(-1).double(), lambda: x.softmax(-1)).ok
    assert not judged(native * (1 + 1e-12), lambda: x.softmax(-1)).ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_grades(dtype: torch.dtype) -> None:
    """float32 inside with one rounding is A, rounding as the reference does B, worse C, and out of the fence D."""
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(32, 256, generator=generator).to(dtype)
    weight = (1 + 0.2 * torch.randn(256, generator=generator)).to(dtype)

    def reference() -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return normed.to(dtype) * weight

    fused = rms_norm(x, weight)
    low = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))) * weight

    assert judged(fused, reference, strict=True).grade == "A"
    assert judged(reference(), reference, strict=True).grade == "B"
    assert judged(reference(), reference).grade is None
    assert judged((low * 1.01).to(dtype), reference, strict=True).grade == ("C" if dtype == torch.bfloat16 else "D")
    assert judged((low * 1.05).to(dtype), reference, strict=True).grade == "D"


def test_shape_and_dtype_must_agree() -> None:
    """A candidate of another shape or dtype fails as such, whatever its values."""
    x = torch.randn(4, 8)

    assert judged((x * 1.1)[:3], lambda: x * 1.1).statistic == "shape"
    assert judged((x * 1.1).double(), lambda: x * 1.1).statistic == "shape"


def test_mild_failures_are_statistical_and_gross_ones_are_not() -> None:
    """A factor of 1 + 2e-5 has to be repeated by fresh values; zeros have not."""
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(5))

    mild = judged(x.softmax(-1) * (1 + 4e-6), lambda: x.softmax(-1))
    gross = judged(torch.zeros_like(x), lambda: x.softmax(-1))

    assert (mild.ok, mild.statistical) == (False, True)
    assert (gross.ok, gross.statistical) == (False, False)
    assert gross.mismatched == gross.total == x.numel()


def test_fresh_lanes_are_asked_for_only_on_failure() -> None:
    """Passing candidates cost no second run of the reference; failures are judged by the fresh lanes."""
    x = torch.randn(8, 64)
    few = run_lanes(lambda: [x.softmax(-1)], seed=1).outputs[0]
    asked = []

    def more() -> OutputLanes:
        asked.append(1)
        return run_lanes(lambda: [x.softmax(-1)], lanes=24, seed=2).outputs[0]

    assert judge_output(x.softmax(-1), few, more).ok
    assert not asked
    assert not judge_output(x.softmax(-1) * 1.01, few, more).ok
    assert len(asked) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_flash_attention_and_naive_attention(dtype: torch.dtype) -> None:
    """An online kernel that stores its weights low passes an upcast reference; a wrong scale or mask does not."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 96, 32, generator=generator).to(dtype) for _ in range(3))

    def reference() -> Tensor:
        scores: Tensor = q.float() @ k.float().transpose(-1, -2) * 32**-0.5
        mixed: Tensor = scores.softmax(-1) @ v.float()
        return mixed.to(dtype)

    def flash(scale: float = 32**-0.5, last: int = 96) -> Tensor:
        top, total = torch.full((2, 96, 1), -math.inf), torch.zeros(2, 96, 1)
        out = torch.zeros(2, 96, 32)
        for start in range(0, last, 32):
            part = slice(start, min(start + 32, last))
            scores = q.float() @ k[:, part].float().transpose(-1, -2) * (scale * math.log2(math.e))
            higher = torch.maximum(top, scores.amax(-1, True))
            weights, shrink = torch.exp2(scores - higher), torch.exp2(top - higher)
            total = total * shrink + weights.sum(-1, True)
            out = out * shrink + weights.to(dtype).float() @ v[:, part].float()
            top = higher
        return (out / total).to(dtype)

    assert all(judged(flash(), reference, seed=s).ok for s in range(5))
    assert not judged(flash(scale=33**-0.5), reference).ok
    assert not judged(flash(last=95), reference).ok


def test_outliers_of_a_gelu_tail_do_not_excuse_its_peaks() -> None:
    """Half of the elements in the negative tail have errors as large as themselves; a peak off by 7 % is found."""
    x = (torch.randn(32, 512, generator=torch.Generator().manual_seed(1))).bfloat16()

    def reference() -> Tensor:
        return F.gelu(x @ x.t())

    wrong = reference()
    wrong[1, 1] *= 1.07

    assert judged(reference(), reference).ok
    assert judged(F.gelu(x.float() @ x.float().t()).bfloat16(), reference).ok
    assert not judged(wrong, reference).ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_elements_at_another_neighbour_are_counted(dtype: torch.dtype) -> None:
    """One element in 50 at the second-nearest value fails, though no single one is further off than allowed."""
    generator = torch.Generator().manual_seed(9)
    x, weight = torch.randn(32, 256, generator=generator).to(dtype), torch.ones(256, dtype=dtype)
    native = rms_norm(x, weight)
    wide = x.double()
    exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    away = torch.where(exact.abs() > native.double().abs(), 1, -1).to(torch.int16)
    other = (native.view(torch.int16) + away).view(dtype)
    moved = native.clone().flatten()
    moved[::50] = other.flatten()[::50]

    verdict = judged(moved.reshape(32, 256), lambda: rms_norm(x, weight))

    assert judged(native, lambda: rms_norm(x, weight)).ok
    assert not verdict.ok
    assert verdict.statistic == "moved"
    assert verdict.mismatched == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_inputs_that_are_equally_wrong_are_no_common_factor(dtype: torch.dtype) -> None:
    """2^17 bfloat16 numbers are a few thousand different ones: log(1 + exp(-x)) errs alike on each, which is honest."""
    x = (torch.randn(512, 256, generator=torch.Generator().manual_seed(5)) * 30).to(dtype)
    wide = x.float()
    candidate = (wide.clamp_max(0) - torch.log(1 + torch.exp(-wide.abs()))).to(dtype)

    assert judged(candidate, lambda: F.logsigmoid(x.float()).to(dtype)).ok


def test_a_common_factor_is_found_among_repeated_values() -> None:
    """A divisor that is off by 1 % shows although each value occurs 32 times."""
    values = torch.randn(256, generator=torch.Generator().manual_seed(5)).bfloat16()
    x = values.repeat(32).reshape(32, 256)

    assert not judged((x.float() * 0.3333 * 1.01).bfloat16(), lambda: (x.float() / 3).to(x.dtype)).ok


REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "one minus a sigmoid": lambda x: 1 - torch.sigmoid(x),
    "a derivative of tanh": lambda x: 1 - torch.tanh(x) ** 2,
    "entropy of logits": lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).to(x.dtype), reduction="none"),
}
# In float64: what each of them is without the cancellation.
STABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "one minus a sigmoid": lambda x: torch.sigmoid(-x),
    "a derivative of tanh": lambda x: 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x),
    "entropy of logits": lambda x: F.softplus(-x.abs()),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", REFERENCES)
def test_what_16_bits_hold_by_chance_binds_no_kernel_of_float32(name: str, dtype: torch.dtype) -> None:
    """Where roundings cancel to 0 a stable formula may have what is left; at other places it is held."""
    x = torch.tensor([[0.5, -0.75, 1.5, 3.0, -5.0, 20.0, 40.0, -60.0]]).to(dtype)
    right = STABLE[name](x.double())
    wrong = right.clone()
    wrong[0, 2] *= 1.05

    verdict = judged(right.to(dtype), lambda: REFERENCES[name](x), strict=True)

    assert verdict.ok
    assert verdict.grade == "A"
    assert not judged(wrong.to(dtype), lambda: REFERENCES[name](x)).ok
    assert not judged((right + 0.01).to(dtype), lambda: REFERENCES[name](x)).ok


def test_a_merge_of_two_log_sum_exps_passes_beside_logaddexp() -> None:
    """As split attention has it: 1 + e is rounded where log1p takes e alone. In another base it fails."""
    generator = torch.Generator().manual_seed(5)
    a, b = (3 * torch.randn(200, 100, generator=generator) for _ in range(2))
    top = torch.maximum(a, b)
    low = torch.minimum(a, b) - top
    assert judged(top + torch.log(torch.exp(a - top) + torch.exp(b - top)), lambda: torch.logaddexp(a, b)).ok
    assert not judged(top + torch.log1p(torch.exp2(low)), lambda: torch.logaddexp(a, b)).ok
    assert not judged(top + torch.log1p(torch.exp(low.bfloat16().float())), lambda: torch.logaddexp(a, b)).ok


def test_a_row_that_is_further_off_is_named() -> None:
    """The worst single element need not lie in it."""
    x = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(3))

    def reference() -> Tensor:
        return (x * 1.7).softmax(-1)

    candidate = reference()
    candidate[1, 5] *= 1 + 17 * 2.0**-23
    verdict = judged(candidate, reference)

    assert verdict.statistic == "row"
    assert "row [1, 5] is" in verdict.reason
