"""The linear_cross_entropy kernel beyond its specs: a second source, both times of its gradients, what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from reference_kernels.linear_cross_entropy import kernel, linear_cross_entropy, linear_cross_entropy_reference
from reference_kernels.linear_cross_entropy.chunks import config

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"label_smoothing": 0.2, "z_loss": 0.05, "softcap": 2.0},
)
REDUCTIONS = ("none", "mean", "sum")
WAYS = [("backward", reduction) for reduction in REDUCTIONS] + [("forward", "mean"), ("forward", "sum")]


def _inputs(
    rows: int = 7, hidden: int = 20, vocab: int = 40, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, weight and bias, which require grad, and labels, the second and every fourth from there ignored."""
    generator = torch.Generator().manual_seed(4)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((rows, hidden), (vocab, hidden), (vocab,))
    )
    target = torch.randint(vocab, (rows,), generator=generator)
    target[1::4] = -100
    return x, weight, bias, target


def _by_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """`F.cross_entropy` of `F.linear`, with the log-sum-exp from its definition."""
    logits = F.linear(x, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    counts = target != -100
    squares = logits.exp().sum(-1).log() ** 2 * counts
    loss = F.cross_entropy(logits, target, label_smoothing=label_smoothing, reduction=reduction)
    if reduction == "none":
        return loss + z_loss * squares
    return loss + z_loss * squares.sum() / (counts.sum() if reduction == "mean" else 1)


@pytest.mark.parametrize("chunk_rows", [None, 3])
@pytest.mark.parametrize(("gradients", "reduction"), WAYS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_reference_and_kernel_are_torchs(
    options: dict[str, Any], gradients: Any, reduction: Any, chunk_rows: int | None
) -> None:
    """In float64 the reference, and to float32 accuracy the kernel in one chunk or several, have torch's loss and
    gradients, times an upstream gradient that is not 1."""
    *leaves, target = _inputs()
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = _by_torch(*exact[:2], target, exact[2], reduction=reduction, **options)
    upstream = torch.linspace(-2, 3, 7, dtype=torch.float64)[: wanted.numel()].reshape(wanted.shape)
    right = torch.autograd.grad(wanted, exact, upstream)
    ways = {"reduction": reduction, "gradients": gradients, "chunk_rows": chunk_rows, **options}

    reference = linear_cross_entropy_reference(*exact[:2], target, exact[2], compute=torch.float64, **ways)
    got = linear_cross_entropy(*leaves[:2], target, leaves[2], **ways)

    torch.testing.assert_close(reference, wanted.detach().requires_grad_(), rtol=1e-12, atol=1e-12)
    for found, d in zip(torch.autograd.grad(reference, exact, upstream), right, strict=True):
        torch.testing.assert_close(found, d, rtol=1e-10, atol=1e-12)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=3e-6, atol=3e-6)
    for found, d in zip(torch.autograd.grad(got, leaves, upstream.float()), right, strict=True):
        torch.testing.assert_close(found.double(), d, rtol=2e-5, atol=2e-6)


def test_logits_are_rounded() -> None:
    """In half precision the loss is cross_entropy's of logits of that precision, and each gradient within what rounding
    those of the logits leaves."""
    *leaves, target = _inputs(dtype=torch.float16)
    logits = F.linear(*leaves)

    loss = linear_cross_entropy(*leaves[:2], target, leaves[2])
    wanted = F.cross_entropy(logits.float(), target)

    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    for found, d in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        torch.testing.assert_close(found, d, rtol=4e-3, atol=1e-4)


def test_every_time_and_chunk_gives_the_same_loss() -> None:
    """Rows have the same loss, to the bit, in any chunks of float32, early and late."""
    x, weight, bias, target = _inputs(rows=9)
    losses = [
        linear_cross_entropy(x, weight, target, bias, reduction="sum", gradients=gradients, chunk_rows=rows)
        for gradients, rows in itertools.product(("forward", "backward"), (None, 1, 4, 100))
    ]
    for loss in losses:
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("gradients", ["forward", "backward"])
def test_a_second_backward(gradients: Any) -> None:
    """Through a retained graph a second backward gives the same bits, another upstream gradient its multiple, and the
    first gradients stay as they were."""
    x, weight, bias, target = _inputs(dtype=torch.bfloat16)
    loss = linear_cross_entropy(x, weight, target, bias, gradients=gradients, chunk_rows=3)
    leaves = (x, weight, bias)

    first = torch.autograd.grad(loss, leaves, torch.tensor(0.7), retain_graph=True)
    kept = [d.clone() for d in first]
    second = torch.autograd.grad(loss, leaves, torch.tensor(0.7), retain_graph=True)
    double = torch.autograd.grad(loss, leaves, torch.tensor(1.4))

    for one, copy, two, twice in zip(first, kept, second, double, strict=True):
        assert torch.equal(one, copy)
        assert torch.equal(one, two)
        assert torch.equal(2 * one, twice)


@pytest.mark.parametrize("gradients", ["forward", "backward"])
@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (0, 2)])
def test_only_what_is_asked_for(asked: tuple[int, ...], gradients: Any) -> None:
    """Of a frozen input, weight or bias no gradient is computed, and the others are what they are beside it."""
    *leaves, target = _inputs()
    whole = torch.autograd.grad(linear_cross_entropy(*leaves[:2], target, leaves[2], gradients=gradients), leaves)
    frozen = [leaf.detach().requires_grad_(place in asked) for place, leaf in enumerate(leaves)]
    loss = linear_cross_entropy(*frozen[:2], target, frozen[2], gradients=gradients)
    loss.backward()

    for place, (leaf, wanted) in enumerate(zip(frozen, whole, strict=True)):
        assert leaf.grad is None if place not in asked else torch.equal(leaf.grad, wanted)


def test_without_grad_nothing_is_computed_for_it() -> None:
    """Under no_grad, and of inputs that need none, early gradients are not computed: their memory is empty."""
    x, weight, bias, target = _inputs()
    seen = []
    original = kernel._early
    kernel._early = lambda *arguments: seen.append(arguments) or original(*arguments)  # type: ignore[func-returns-value]
    try:
        with torch.no_grad():
            linear_cross_entropy(x, weight, target, bias, gradients="forward")
        linear_cross_entropy(x.detach(), weight.detach(), target, gradients="forward")
        assert not seen
        linear_cross_entropy(x, weight, target, bias, gradients="forward")
        assert len(seen) == 1
    finally:
        kernel._early = original


@pytest.mark.parametrize(("gradients", "reduction"), WAYS)
def test_a_label_out_of_range_makes_its_row_nan(gradients: Any, reduction: Any) -> None:
    """Its loss and its row of the input's gradient are NaN, as the reference's; of rows apart, those alone."""
    x, weight, bias, target = _inputs()
    for label in (40, -1, 2**62):
        target[3] = label
        ways = {"reduction": reduction, "gradients": gradients, "chunk_rows": 2}
        losses = [f(x, weight, target, bias, **ways) for f in (linear_cross_entropy, linear_cross_entropy_reference)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5, equal_nan=True)
        for got, wanted in zip(*(torch.autograd.grad(loss.sum(), (x, weight, bias)) for loss in losses), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
            assert got.isnan().any()


@pytest.mark.parametrize("gradients", ["forward", "backward"])
def test_infinities_are_torchs(gradients: Any) -> None:
    """NaN and infinity in the input, and a class that the bias forbids, have the reference's loss and gradients."""
    for place, value in ((0, float("nan")), (1, float("inf")), (2, float("-inf"))):
        x, weight, bias, target = _inputs()
        with torch.no_grad():
            if place == 2:
                bias[(int(target[0]) + 1) % 40] = value
            else:
                x[0, 3 * place] = value
        ways = {"gradients": gradients, "chunk_rows": 2}
        losses = [f(x, weight, target, bias, **ways) for f in (linear_cross_entropy, linear_cross_entropy_reference)]

        assert losses[0].isnan() == (place < 2)
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5, equal_nan=True)
        for got, wanted in zip(*(torch.autograd.grad(loss, (x, weight, bias)) for loss in losses), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_nothing_counts() -> None:
    """Of rows that are all ignored the mean is NaN, as torch has it, the sum 0, and every gradient 0."""
    x, weight, bias, target = _inputs()
    target.fill_(-100)
    for gradients, reduction in WAYS:
        loss = linear_cross_entropy(x, weight, target, bias, reduction=reduction, gradients=gradients)  # type: ignore[arg-type]
        assert loss.isnan() if reduction == "mean" else not loss.any()
        for d in torch.autograd.grad(loss.sum(), (x, weight, bias)):
            assert torch.equal(d, torch.zeros_like(d))


@pytest.mark.parametrize("gradients", ["forward", "backward"])
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 4), (0,)])
def test_sizes_of_zero(shape: tuple[int, ...], gradients: Any) -> None:
    """No rows or no columns give the reference's loss and zeros for gradients."""
    x, weight = torch.empty(shape, requires_grad=True), torch.ones(6, shape[-1], requires_grad=True)
    bias, target = torch.zeros(6, requires_grad=True), torch.zeros(shape[:-1], dtype=torch.int64)
    for reduction in ("mean", "sum"):
        loss = linear_cross_entropy(x, weight, target, bias, reduction=reduction, gradients=gradients)  # type: ignore[arg-type]
        wanted = linear_cross_entropy_reference(x, weight, target, bias, reduction=reduction)
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
        right = torch.autograd.grad(wanted, (x, weight, bias))
        for d, other in zip(torch.autograd.grad(loss, (x, weight, bias)), right, strict=True):
            torch.testing.assert_close(d, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gradients", ["forward", "backward"])
def test_no_classes(gradients: Any) -> None:
    """Every label is out of range, and the gradients have nothing to flow through."""
    x, weight = torch.ones(3, 4, requires_grad=True), torch.ones(0, 4, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.zeros(3, dtype=torch.int64), gradients=gradients)
    dx, dweight = torch.autograd.grad(loss, (x, weight))

    assert loss.isnan()
    assert not dx.any()
    assert dweight.shape == (0, 4)


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_opcheck(early: bool) -> None:
    """Schema, fake kernels, autograd registration and tracing hold for all operators, strided inputs included."""
    x, weight, bias, target = _inputs(rows=4, hidden=3, vocab=6)
    x = x.detach().t().contiguous().t().requires_grad_()
    reduction = "mean" if early else "none"
    options = (-100, 0.1, 0.01, 2.0, reduction, 3)
    inputs = x, weight, target, bias
    torch.library.opcheck(kernel._linear_cross_entropy, (*inputs, *options, *[early] * 3))
    _, statistics, count, *_ = kernel._linear_cross_entropy(*inputs, *options, *[False] * 3)
    upstream = torch.ones(() if early else 4)
    plain = (each.detach() for each in inputs)
    given = (upstream, *plain, statistics, count, *options, early, True, True, False)
    torch.library.opcheck(kernel._linear_cross_entropy_backward, given)
    if early:
        gradients = torch.ones(4, 3), weight.detach().clone(), torch.ones(6)
        torch.library.opcheck(kernel._linear_cross_entropy_scale, (2 * upstream, *gradients))


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["forward", "backward"])
def test_one_graph(gradients: Any) -> None:
    """The kernel and its gradients compile without a graph break."""
    x, weight, bias, target = _inputs()

    def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return 3 * linear_cross_entropy(x * 2, weight, target, bias, label_smoothing=0.1, gradients=gradients)

    whole = torch.compile(plain, fullgraph=True, backend="aot_eager")
    got, wanted = (torch.autograd.grad(f(x, weight, bias), (x, weight, bias)) for f in (whole, plain))

    torch.testing.assert_close(whole(x, weight, bias), plain(x, weight, bias), rtol=0, atol=0)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("gradients", ["forward", "backward"])
def test_a_second_derivative_is_refused(gradients: Any) -> None:
    """The backward kernels have no gradient of their own, and say so instead of leaving a term out."""
    x, weight, bias, target = _inputs()
    loss = linear_cross_entropy(x, weight, target, bias, gradients=gradients)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(first.square().sum(), x)


def test_an_upstream_gradient_of_one_touches_nothing() -> None:
    """The scaling kernel neither reads nor writes what it multiplies by 1: a signalling NaN keeps its bits."""
    values = torch.full((9000,), -1, dtype=torch.int32).view(torch.float32)
    values[1:] = torch.arange(8999.0)
    before = values.view(torch.int32).clone()

    kernel._scale(values, torch.tensor(1.0))
    assert torch.equal(values.view(torch.int32), before)
    kernel._scale(values, torch.tensor(0.5))
    assert torch.equal(values[1:], torch.arange(8999.0) / 2)


def test_the_weights_gradient_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What forward computed for the weight becomes its ``grad`` as it lies: a gigabyte of a usual vocabulary."""
    x, weight, _, target = _inputs()
    seen = []
    scale = kernel._scale
    monkeypatch.setattr(kernel, "_scale", lambda values, by: (seen.append(values.data_ptr()), scale(values, by)))
    linear_cross_entropy(x, weight, target, gradients="forward").backward()

    assert weight.grad is not None
    assert seen == [weight.grad.data_ptr()]


def test_chunks_fit_the_buffer() -> None:
    """1024 rows of a vocabulary of 128256 in bfloat16 are 250 MiB, and all rows of 16384 classes; small cases are one
    chunk; given rows are taken, and as many elements of classes."""
    found = config(8192, 128256, torch.bfloat16)
    assert (found.rows, found.classes) == (1024, 16384)
    assert found.rows * 128256 * 2 <= 256 * 2**20
    small = config(33, 70, torch.float32)
    assert (small.rows, small.classes) == (33, 70)
    given = config(33, 70, torch.float32, 5)
    assert (given.rows, given.classes) == (5, 10)
    assert config(0, 0, torch.float32, 5).classes == 1


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, "known: none, mean, sum", lambda x, w, t: linear_cross_entropy(x, w, t, reduction="max")),  # type: ignore[arg-type]
        (ValueError, "known: forward, backward", lambda x, w, t: linear_cross_entropy(x, w, t, gradients="no")),  # type: ignore[arg-type]
        (ValueError, "chunk_rows is 0", lambda x, w, t: linear_cross_entropy(x, w, t, chunk_rows=0)),
        (ValueError, "label_smoothing is 2", lambda x, w, t: linear_cross_entropy(x, w, t, label_smoothing=2.0)),
        (TypeError, "x is float64, allowed", lambda x, w, t: linear_cross_entropy(x.double(), w, t)),
        (TypeError, "weight is float16, allowed: float32", lambda x, w, t: linear_cross_entropy(x, w.half(), t)),
        (TypeError, "target is int32", lambda x, w, t: linear_cross_entropy(x, w, t.int())),
        (ValueError, r"do not fit", lambda x, w, t: linear_cross_entropy(x, w.t(), t)),
        (ValueError, r"target \(3,\)", lambda x, w, t: linear_cross_entropy(x, w, t[:3])),
        (
            ValueError,
            r"bias has shape \(20,\), weight needs \(40,\)",
            lambda x, w, t: linear_cross_entropy(x, w, t, x[0]),
        ),
        (ValueError, "target is on meta", lambda x, w, t: linear_cross_entropy(x, w, t.to("meta"))),
        (
            ValueError,
            "'forward' and reduction='none'",
            lambda x, w, t: linear_cross_entropy(x, w, t, reduction="none", gradients="forward"),
        ),
        (
            ValueError,
            "'forward' and float16",
            lambda x, w, t: linear_cross_entropy(x.half(), w.half(), t, gradients="forward"),
        ),
    ],
)
def test_what_is_refused(error: type[Exception], words: str, call: Callable[..., object]) -> None:
    """What the kernel does not support is refused in words, before anything is launched."""
    x, weight, _, target = _inputs()
    with pytest.raises(error, match=words):
        call(x, weight, target)
