"""The gating kernel beyond its specs: a second source of the reference, ties, registration, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from reference_kernels.moe_gate import moe_gate, moe_gate_reference
from reference_kernels.moe_gate.kernel import _moe_gate, config, group_of


def _logits(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _by_topk(logits: torch.Tensor, k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The composition of most models: softmax, ``torch.topk`` of it, division by the sum of what was chosen."""
    weights, experts = torch.topk(torch.softmax(logits, -1), k, dim=-1)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, experts


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (60, 7), (5, 5), (3, 1)])
def test_the_reference_is_topk_of_softmax(experts: int, k: int, renormalize: bool) -> None:
    """In float64 the reference and its gradient are those of ``torch.topk`` of the softmax, renormalised."""
    logits = _logits(4, 3, experts).requires_grad_()
    wanted, which = _by_topk(logits, k, renormalize)
    dy = _logits(4, 3, k)
    (gradient,) = torch.autograd.grad(wanted, logits, dy)

    got, chosen = moe_gate_reference(logits, k, renormalize, torch.float64)

    assert torch.equal(chosen, which)
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(torch.autograd.grad(got, logits, dy)[0], gradient, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (130, 64), (64, 6)])
def test_the_kernel_is_topk_of_softmax(experts: int, k: int, renormalize: bool) -> None:
    """Weights and gradients are those of ``torch.topk`` of the float64 softmax to float32 accuracy."""
    exact = _logits(9, experts).float().double().requires_grad_()
    wanted, which = _by_topk(exact, k, renormalize)
    dy = _logits(9, k).float()
    (gradient,) = torch.autograd.grad(wanted, exact, dy.double())
    logits = exact.detach().float().requires_grad_()

    got, chosen = moe_gate(logits, k, renormalize)

    assert torch.equal(chosen, which)
    torch.testing.assert_close(got.double(), wanted, rtol=2e-6, atol=1e-8)
    torch.testing.assert_close(torch.autograd.grad(got, logits, dy)[0].double(), gradient, rtol=1e-5, atol=1e-7)


def test_of_equal_logits_the_lower_number_comes_first() -> None:
    """Ties, both zeros among them, are broken by the expert's number, and every expert is chosen once."""
    for row in ([0.0] * 40, [-0.0, 0.0, 1.0] * 10, [-torch.inf] * 20, [1.0, -torch.inf] * 16):
        k = min(len(row), 33)
        wanted = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]

        assert moe_gate(torch.tensor(row), k)[1].tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("experts", "k"), [(60, 1), (64, 2), (200, 3), (256, 8), (17, 2)])
def test_groups_with_equal_maxima(experts: int, k: int, dtype: torch.dtype) -> None:
    """Where rounds go over groups of experts first, logits with many ties choose what a stable sort chooses."""
    assert group_of(config(experts).columns, k, dtype.itemsize) > 1
    logits = _logits(40, experts).mul(2).round().to(dtype)
    logits[3], logits[4, experts // 2], logits[5, 1:] = -torch.inf, torch.nan, -torch.inf

    got = moe_gate(logits, k)[1]

    assert torch.equal(got, moe_gate_reference(logits, k)[1])


@pytest.mark.parametrize("renormalize", [True, False])
def test_nan_and_infinity_choose_experts_that_exist(renormalize: bool) -> None:
    """A row with NaN or +inf, or of nothing but -inf, has NaN for weights and the reference's experts; the rows beside
    it are spared."""
    logits = torch.zeros(4, 5)
    logits[0, 3], logits[1, 2], logits[2] = torch.nan, torch.inf, -torch.inf

    weights, experts = moe_gate(logits, 3, renormalize)

    wanted = moe_gate_reference(logits, 3, renormalize)
    assert torch.equal(experts, wanted[1])
    torch.testing.assert_close(weights, wanted[0], equal_nan=True)
    assert weights[:3].isnan().all()


def test_logits_far_apart() -> None:
    """Differences beyond exp's range give weights of 1 and 0 and a gradient of 0, not NaN."""
    logits = torch.tensor([[3e38, -3e38, 0.0], [-1e4, 1e4, 0.0]], requires_grad=True)
    weights, experts = moe_gate(logits, 2)
    (gradient,) = torch.autograd.grad(weights[:, 0].sum(), logits)

    assert weights.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert experts.tolist() == [[0, 2], [1, 2]]
    assert gradient.tolist() == [[0.0] * 3] * 2


@pytest.mark.slow
def test_opcheck() -> None:
    """Schema, fake kernel, autograd registration and tracing hold, strided and empty inputs included."""
    logits = _logits(4, 6).float().t().contiguous().t().requires_grad_()
    for renormalize in (True, False):
        torch.library.opcheck(_moe_gate, (logits, 3, renormalize))
    torch.library.opcheck(_moe_gate, (torch.empty(0, 6), 3, True))


@pytest.mark.slow
def test_one_graph() -> None:
    """The kernel and its gradient compile without a graph break."""
    logits = _logits(4, 6).float().requires_grad_()

    whole = torch.compile(moe_gate, fullgraph=True, backend="aot_eager")(logits, 2)

    plain = moe_gate(logits, 2)
    torch.testing.assert_close(whole, plain, rtol=0, atol=0)
    got, wanted = (torch.autograd.grad(weights.square().sum(), logits) for weights, _ in (whole, plain))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_second_derivative_is_refused() -> None:
    """The backward kernel has no gradient of its own, and says so instead of leaving a term out."""
    logits = _logits(2, 8).float().requires_grad_()
    (first,) = torch.autograd.grad(moe_gate(logits, 2)[0].square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(first.sum(), logits)


@pytest.mark.parametrize(("shape", "k"), [((0,), 0), ((0, 8), 2), ((3, 0), 0), ((3, 4), 0), ((2, 0, 4), 1)])
def test_sizes_of_zero(shape: tuple[int, ...], k: int) -> None:
    """No rows, no experts or none chosen give empty results, and a gradient of zeros."""
    logits = torch.ones(shape, requires_grad=True)

    weights, experts = moe_gate(logits, k)

    assert weights.shape == experts.shape == (*shape[:-1], k)
    assert torch.equal(torch.autograd.grad(weights.sum(), logits)[0], torch.zeros(shape))


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "logits is float64, allowed: float32", lambda x: moe_gate(x.double(), 1)),
        (TypeError, "logits is int64", lambda x: moe_gate(x.long(), 1)),
        (ValueError, "at least one", lambda x: moe_gate(x[0, 0], 0)),
        (ValueError, "k is 5, allowed with 4 experts: 0 to 4", lambda x: moe_gate(x, 5)),
        (ValueError, "k is -1", lambda x: moe_gate(x, -1)),
        (ValueError, "k is 65, allowed with 100 experts: 0 to 64", lambda x: moe_gate(x[:, :1].expand(2, 100), 65)),
        (ValueError, "supported: up to 4096", lambda x: moe_gate(x[:, :1].expand(2, 4097), 1)),
    ],
)
def test_what_is_refused(error: type[Exception], words: str, call: Callable[[torch.Tensor], object]) -> None:
    """What the kernel does not support is refused in words, before anything is launched."""
    with pytest.raises(error, match=words):
        call(torch.ones(2, 4))
