"""Grade C: what is less accurate than the reference, and no worse than twice what eager PyTorch loses, is not wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_fusion.oracle.tolerance import ValuesVerdict
from tests.oracle.tolerance.judging import judged

LOW = (torch.float16, torch.bfloat16)
Natural = Callable[..., Tensor]


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def graded(kernel: Natural, reference: Natural, *inputs: Tensor) -> ValuesVerdict:
    """The verdict on ``kernel`` by a reference that computes in float32 and rounds once."""
    dtype = inputs[0].dtype
    return judged(kernel(*inputs).to(dtype), lambda: reference(*(t.float() for t in inputs)).to(dtype))


def rms_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def cast_before_weight(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm(x.float(), torch.ones(())).to(x.dtype) * w


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def stored_half_way(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.float()).to(up.dtype) * up


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def scaled_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The scale is a factor of ``q``, rounded once; probabilities are stored in 16 bits."""
    scores = (q.float() / math.sqrt(q.shape[-1])).to(q.dtype).float() @ k.float().mT
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights.to(v.dtype).float() @ v.float() / weights.sum(-1, keepdim=True)


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


def difference(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return x @ w - y @ w


def factor_rounded_once(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return (x.float() - y.float()).to(x.dtype).float() @ w.float()


def recurrence(decay: Tensor, x: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[0]), []
    for a, step in zip(torch.sigmoid(decay), x, strict=True):
        state = a * state + step
        found.append(state)
    return torch.stack(found)


def in_chunks(decay: Tensor, x: Tensor) -> Tensor:
    """By products of decays within chunks of eight, and a state in 16 bits between them."""
    found, state = [], torch.zeros_like(x[0])
    for a, part in zip(torch.sigmoid(decay.float()).split(8), x.float().split(8), strict=True):
        grown = a.cumprod(0)
        inner = grown * ((part / grown).cumsum(0) + state.float())
        state = inner[-1].to(x.dtype)
        found.append(inner)
    return torch.cat(found)


HONEST: dict[str, tuple[Natural, Natural, tuple[tuple[int, ...], ...]]] = {
    "a cast before the weight": (cast_before_weight, rms_norm, ((16, 256), (256,))),
    "a product of a stored activation": (stored_half_way, swiglu, ((16, 64), (16, 64))),
    "rotation in 16 bits": (rotated, rotated, ((16, 64), (16, 32), (16, 32))),
    "scores scaled before": (scaled_before, attention, ((32, 64), (48, 64), (48, 64))),
    "scores scaled before, fused": (scaled_before, fused_attention, ((32, 64), (48, 64), (48, 64))),
    "a factor of terms that cancel": (factor_rounded_once, difference, ((16, 64), (16, 64), (64, 16))),
    "a recurrence in chunks": (in_chunks, recurrence, ((32, 16), (32, 16))),
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", HONEST)
def test_an_intermediate_in_16_bits_is_not_wrong(name: str, dtype: torch.dtype) -> None:
    """Kernels that round where eager PyTorch rounds are less accurate than a float32 reference, and no more."""
    kernel, reference, shapes = HONEST[name]
    inputs = [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes, 1)]
    verdict = graded(kernel, reference, *inputs)
    assert verdict.ok or verdict.grade == "C", verdict.reason


@pytest.mark.parametrize("name", ["a cast before the weight", "a product of a stored activation"])
def test_an_intermediate_in_16_bits_is_found(name: str) -> None:
    """The same kernels are not as accurate as the float32 reference: that is the hazard."""
    kernel, reference, shapes = HONEST[name]
    verdict = graded(kernel, reference, *(normal(*shape, seed=i) for i, shape in enumerate(shapes, 1)))
    assert (verdict.ok, verdict.grade) == (False, "C"), verdict.reason


def softmax_gradient(x: Tensor, upstream: Tensor) -> Tensor:
    """From probabilities that forward has rounded, as torch and fused kernels have it."""
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(torch.softmax(leaf, -1), leaf, upstream)[0]


def without_last_term(x: Tensor, upstream: Tensor) -> Tensor:
    probabilities = torch.softmax(x.float(), -1).to(x.dtype).float()
    products = probabilities * upstream.float()
    return products - probabilities * products[..., :-1].sum(-1, keepdim=True)


def sum_in_16_bits(x: Tensor, upstream: Tensor) -> Tensor:
    """The gradient of a softmax as a kernel has it that never leaves 16 bits, its sum in pairs."""
    probabilities = torch.softmax(x.float(), -1).to(x.dtype)
    total = F.pad(probabilities * upstream, (0, 512 - x.shape[-1]))
    while total.shape[-1] > 1:
        left, right = total.chunk(2, -1)
        total = left + right
    return probabilities * (upstream - total)


@pytest.mark.parametrize("dtype", LOW)
def test_the_sum_of_a_softmax_gradient_may_be_rounded(dtype: torch.dtype) -> None:
    """As the formula written out has it; one term of 33 that is left out is wrong all the same."""
    for seed in range(24):
        rows, n = (1, 3, 64)[seed // 4 % 3], (5, 16, 33, 257)[seed % 4]
        x = normal(rows, n, seed=seed, dtype=dtype) * (0.001 if seed % 3 else 1)
        upstream = normal(1, seed=seed + 99, dtype=dtype).expand(rows, n)
        verdict = graded(sum_in_16_bits, softmax_gradient, x, upstream)
        assert verdict.ok or verdict.grade == "C", (seed, verdict)
        assert n > 33 or graded(without_last_term, softmax_gradient, x, upstream).grade == "D", seed


def label_apart(x: Tensor, w: Tensor) -> Tensor:
    """The loss of the first class, whose logit is a sum of products in 16 bits, all others of float32."""
    return torch.logsumexp(x.float() @ w.float().mT, -1) - (x * w[0]).float().sum(-1)


@pytest.mark.parametrize("dtype", LOW)
def test_the_logit_of_the_label_may_be_computed_apart(dtype: torch.dtype) -> None:
    """Of one class the loss is exactly 0, and what is left is a rounding of its logit; eight roundings are wrong."""

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(x @ w.mT, torch.zeros(len(x), dtype=torch.long), reduction="none")

    for seed, (hidden, vocab) in enumerate(((1, 1), (1, 1), (1, 3), (8, 1), (8, 3), (2, 1), (64, 1))):
        x, w = normal(16, hidden, seed=seed, dtype=dtype), normal(vocab, hidden, seed=seed + 99, dtype=dtype)
        got, right = label_apart(x, w), loss(x.float(), w.float())
        verdict = judged(got, lambda x=x, w=w: loss(x.float(), w.float()), seed=seed)
        assert verdict.ok or verdict.grade == "C", (seed, verdict)
        off = right + 8 * (got - right)
        assert vocab > 1 or judged(off, lambda x=x, w=w: loss(x.float(), w.float()), seed=seed).grade == "D", seed


@pytest.mark.parametrize("dtype", LOW)
def test_the_mean_of_equal_rows_is_off_by_as_much_as_one(dtype: torch.dtype) -> None:
    """What rounds one of them rounds all, in eager PyTorch too: cut-cross-entropy of an expanded input."""
    for seed in range(4):
        x, w = normal(1, 64, seed=seed, dtype=dtype).expand(19, 64), normal(1, 64, seed=seed + 99, dtype=dtype)

        def loss(x: Tensor = x, w: Tensor = w) -> Tensor:
            return F.cross_entropy(x.float() @ w.float().mT, torch.zeros(len(x), dtype=torch.long))

        assert judged(label_apart(x, w).mean(), loss, seed=seed).grade == "C", seed
        units = 8 * torch.finfo(dtype).eps * (x[0].float() * w[0].float()).norm()
        assert judged(units, loss, seed=seed).grade == "D", seed


def test_where_the_reference_overflows_a_finite_result_is_not_wrong() -> None:
    """The logit of the only class passes float16, and the loss of the reference is NaN, which should be 0."""
    x, w = torch.tensor([[256.0, 64, 34.65, -256.25], [-128.125, 16, -256.25, 127.94]], dtype=torch.float16).split(1)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(x @ w.mT, torch.zeros(1, dtype=torch.long)).float()

    assert bool(loss(x, w).isnan())
    for size, grade in ((1.0, "C"), (0.5, "D")):
        assert judged(torch.tensor(-16.6), lambda size=size: loss(size * x, w)).grade == grade


@pytest.mark.parametrize("dtype", LOW)
def test_rows_off_by_one_number_are_worth_more_samples_than_one(dtype: torch.dtype) -> None:
    """Gradients that are exactly 0, of one upstream number: what rounded probabilities add up to is a row's error."""
    grades = set()
    for seed, (rows, n) in enumerate(((1, 5), (1, 33), (3, 16), (3, 257), (64, 33)), 1):
        x, upstream = normal(rows, n, seed=seed, dtype=dtype), normal(1, seed=9, dtype=dtype).expand(rows, n)
        grades.add(graded(softmax_gradient, softmax_gradient, x, upstream).grade)
        assert graded(without_last_term, softmax_gradient, x, upstream).grade == "D"
    assert grades == {"C"}


def test_rows_in_which_the_reference_is_exact_by_its_arithmetic_are_held_to_the_others() -> None:
    """The last step of a running sum from the end is a copy; from the total it is a difference, as in chunks of FLA."""
    x = F.logsigmoid(2 + torch.randn(8, 16, 16, generator=torch.Generator().manual_seed(3)))
    eager = x.flip(1).cumsum(1).flip(1)
    from_total = x.sum(1, keepdim=True) - x.cumsum(1) + x
    assert torch.equal(eager[:, -1], x[:, -1])
    assert not torch.equal(from_total[:, -1], x[:, -1])
    verdict = judged(from_total, lambda: x.flip(1).cumsum(1).flip(1), narrow=False)
    assert verdict.grade == "C", verdict.reason


@pytest.mark.parametrize(("times", "chance"), [(3.0, True), (400.0, False)])
def test_a_failure_near_the_fence_must_be_repeated(times: float, chance: bool) -> None:
    """All errors of a row may follow from one rounding: a few times what one run of eager PyTorch loses is chance."""
    q, k, v = (normal(1, 64, seed=seed) for seed in (1, 2, 3))
    k, v = torch.cat([k, normal(1, 64, seed=4)]), torch.cat([v, normal(1, 64, seed=5)])
    exact = attention(*(t.double() for t in (q, k, v)))
    lost = (attention(q, k, v) - exact).abs().amax()
    verdict = graded(lambda *_: exact + 2 * times * lost, attention, q, k, v)
    assert (verdict.grade, verdict.statistical) == ("D", chance), verdict.reason


def test_an_exact_sum_in_16_bits_is_luck() -> None:
    """The sum of all is a bfloat16 number, those of rows are not: half a unit off, and no more, is less accurate."""
    x = torch.tensor([[0.06640625, 0.06689453125], [0.04345703125, 0.04296875]], dtype=torch.bfloat16)
    in_rows = x.sum(-1).float().sum()
    assert judged(in_rows, lambda: x.float().sum()).grade == "C"
    assert judged(in_rows * 1.02, lambda: x.float().sum()).grade == "D"


WRONG: dict[str, Natural] = {
    "another eps": lambda x, w: rms_norm(x.float() * 1e-3, w.float(), 1e-5),
    "a dropped tail": lambda x, w: torch.cat([rms_norm(x, w)[..., :-1], x[..., -1:] * 0], -1),
    "a missing factor": lambda x, w: rms_norm(x, torch.ones_like(w)),
    "one element": lambda x, w: rms_norm(x, w).index_fill(-1, torch.tensor([7]), 0.5),
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", WRONG)
def test_planted_bugs_stay_wrong(name: str, dtype: torch.dtype) -> None:
    """A wrong eps, a dropped element, a missing weight and one wrong element are no matter of precision."""
    x, w = normal(16, 256, dtype=dtype), normal(256, seed=2, dtype=dtype)
    reference = (lambda x, w: rms_norm(x * 1e-3, w)) if name == "another eps" else rms_norm
    verdict = graded(WRONG[name], reference, x, w)
    assert (verdict.ok, verdict.grade) == (False, "D"), verdict


@pytest.mark.parametrize("dtype", LOW)
def test_a_sum_in_16_bits_is_found(dtype: torch.dtype) -> None:
    """Over thousands of terms it loses several per cent, which no operation of eager PyTorch does."""
    x = normal(8, 4096, dtype=dtype).abs()
    total = torch.zeros(8, dtype=dtype)
    for part in x.split(16, -1):
        total = total + part.float().sum(-1).to(dtype)
    verdict = judged(total, lambda: x.float().sum(-1).to(dtype))
    assert not verdict.ok
    if dtype == torch.bfloat16:
        assert verdict.grade == "D", verdict.reason


def test_exact_results_have_no_fence() -> None:
    """A copy, a selection and integers are the reference's numbers or wrong, whatever eager PyTorch loses."""
    x = normal(16, 64)
    off = x.clone()
    off[3, 5] *= 1 + 2.0**-7
    for reference in (x.clone, lambda: torch.where(x > 9, 0, x)):
        assert judged(off, reference).grade == "D"
    assert judged(x.argmax(-1) + 1, lambda: x.argmax(-1)).grade == "D"


def test_in_float32_the_fence_is_a_multiple_of_what_its_own_lanes_lose() -> None:
    """A sum in another order passes; what is off by a few units in one element of a row is less accurate; 1 % wrong."""
    x = normal(8, 512, dtype=torch.float32)
    right = torch.softmax(x, -1)
    assert judged(torch.softmax(x.flip(-1), -1).flip(-1), lambda: torch.softmax(x, -1), narrow=False).ok
    off = right.clone()
    smallest = int(off[2].argmin())
    off[2, smallest] *= 1 + 2.0**-14
    verdict = judged(off, lambda: torch.softmax(x, -1), narrow=False)
    assert (verdict.ok, verdict.grade) == (False, "C"), verdict
    off[2, smallest] = off[2].max() * 0.01
    assert judged(off, lambda: torch.softmax(x, -1), narrow=False).grade == "D"


def by_step(gate: Tensor, x: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[0]), []
    for g, step in zip(gate, x, strict=True):
        state = g.exp() * state + step
        found.append(state)
    return torch.stack(found)


def by_running_sums(gate: Tensor, x: Tensor, *, rounded: Callable[[Tensor], Tensor] = lambda t: t) -> Tensor:
    """Every decay is ``exp`` of the difference of two sums of gates, as in the chunks of gated linear attention."""
    sums, future = gate.cumsum(0), torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    decays = (sums[:, None] - sums[None]).masked_fill(future[..., None], -torch.inf).exp()
    return (rounded(decays) * x[None]).sum(1)


def in_tf32(x: Tensor) -> Tensor:
    return (x.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


def test_another_formula_in_float32_is_less_accurate_and_less_than_float32_is_wrong() -> None:
    """Differences of running sums lose some more units than a product step by step; TF32 loses thousands."""
    gate, x = -torch.rand(64, 16, generator=torch.Generator().manual_seed(1)), normal(64, 16, dtype=torch.float32)

    def reference() -> Tensor:
        return by_step(gate, x)

    right = by_running_sums(gate, x)
    verdict = judged(right, reference, narrow=False)
    assert (verdict.ok, verdict.grade) == (False, "C"), verdict
    assert judged(by_running_sums(gate, x, rounded=in_tf32), reference, narrow=False).grade == "D"
    assert judged(by_running_sums(gate - 1e-3, x), reference, narrow=False).grade == "D"


def test_what_overflows_in_16_bits_is_no_yardstick() -> None:
    """Squares of float16 overflow: a kernel whose norm is zero there is wrong, as eager PyTorch is."""
    x = normal(16, 64, dtype=torch.float16) * 400
    w = torch.ones(64, dtype=torch.float16)
    assert not bool(rms_norm(x, w).any(-1).all())
    assert graded(rms_norm, rms_norm, x, w).grade == "D"
    assert graded(cast_before_weight, rms_norm, x, w).grade != "D"


def test_a_product_that_overflows_in_float16_is_not_wrong() -> None:
    """Logits beyond float16 are infinite in every kernel that stores them; one that is infinite elsewhere is wrong."""
    x, w = (normal(8, 64, seed=seed, dtype=torch.float16) * 100 for seed in (1, 2))
    got = x @ w.mT * 0.01
    infinite = got.isinf()
    assert bool(infinite.any())
    assert not bool(infinite.all())
    for element, grade in ((infinite.nonzero()[0], "C"), ((~infinite).nonzero()[0], "D")):
        made = got.index_put(tuple(element), got.new_tensor(math.inf).copysign(got[tuple(element)]))
        assert graded(lambda *_, made=made: made, lambda x, w: x @ w.mT * 0.01, x, w).grade == grade


def test_an_infinity_of_the_other_sign_may_come_of_a_product() -> None:
    """A score passes float16 and weighs something negative, and the sum is positive and passes it too (chunks of linear
    attention in fla-core). What is infinite where no score passes float16 is wrong."""
    q, k, v = (normal(2, 16, seed=45 + i, dtype=torch.float16) * size for i, size in enumerate((100, 100, 16)))

    def weighted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).tril() * 0.25 @ v

    exact = weighted(q.float(), k.float(), v.float()).half()
    stored = ((q.float() @ k.float().mT).half().tril().float() @ v.float() * 0.25).half()
    assert bool((exact.isinf() & (stored == -exact)).any())
    assert graded(lambda *_: stored, weighted, q, k, v).grade == "C"
    assert graded(lambda *_: stored, weighted, q / 100, k, v).grade == "D"


def weighted_scores(x: Tensor, w: Tensor, query: Tensor) -> Tensor:
    return torch.softmax((rms_norm(x, torch.ones_like(w)) * w * query).sum(-1), -1)


def test_a_weighted_value_that_overflows_in_float16_is_not_wrong() -> None:
    """A normalised value is stored before the weight and after it; infinite without a reason is wrong."""
    x, w, query = (normal(*shape, seed=seed, dtype=torch.float16) for seed, shape in enumerate(((8, 64), (64,), (64,))))
    w = w.clamp(-2, 2) * 25000

    def stored(x: Tensor, w: Tensor, query: Tensor) -> Tensor:
        weighted = rms_norm(x.float(), torch.ones(())).to(x.dtype) * w
        return torch.softmax((weighted.float() * query.float()).sum(-1), -1)

    assert not bool(stored(x, w, query).isfinite().all())
    assert graded(stored, weighted_scores, x, w, query).grade == "C"
    assert graded(stored, weighted_scores, x, w / 25000, query).grade != "D"
    infinite = lambda *_: stored(x, w, query)  # noqa: E731
    assert graded(infinite, weighted_scores, x, w / 25000, query).grade == "D"


def test_a_small_number_of_float16_loses_digits_in_eager_pytorch_too() -> None:
    """The sigmoid of -17 is less than float16's least number: nothing is left of 1.3e-7 (Conch's silu_and_mul). In
    bfloat16, which has float32's range, the same result is wrong."""
    for dtype, grade in ((torch.float16, "C"), (torch.bfloat16, "D")):
        gate, up = (torch.full((4, 16), value, dtype=dtype) for value in (-17.0, -0.2))
        assert graded(lambda gate, _: torch.zeros_like(gate), swiglu, gate, up).grade == grade


@pytest.mark.parametrize(("size", "grade"), [(3e4, "C"), (30.0, "D")])
def test_terms_that_overflow_in_float16_are_no_yardstick(size: float, grade: str) -> None:
    """cut-cross-entropy multiplies in float16 before it adds up. Where a term overflows, eager PyTorch loses everything
    to whoever does so, and no result is worse; where none does, infinity and a wrong number are wrong."""
    a = torch.full((4, 2), size, dtype=torch.float16)
    b = torch.tensor([[3.0, -2.9], [3.0, -2.9]], dtype=torch.float16)
    for kernel in (lambda a, b: (a @ b.mT) * torch.inf, lambda a, b: (a.float() @ b.float().mT) * 1.5):
        assert graded(kernel, lambda a, b: a @ b.mT, a, b).grade == grade
