"""The cross_entropy kernel beyond its specs: a second source of the reference, wrong labels, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import triton.language as tl

from reference_kernels._common import jit
from reference_kernels.cross_entropy import cross_entropy, cross_entropy_reference
from reference_kernels.cross_entropy.kernel import _cross_entropy, _cross_entropy_backward, config
from reference_kernels.cross_entropy.rows import softcapped

REDUCTIONS = ("none", "mean", "sum")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"label_smoothing": 0.2},
    {"z_loss": 0.05},
    {"softcap": 2.0},
    {"label_smoothing": 0.2, "z_loss": 0.05, "softcap": 2.0},
)


def _inputs(
    rows: int = 6, vocab: int = 40, dtype: torch.dtype = torch.float32, scale: float = 2.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels, the second and last row ignored."""
    generator = torch.Generator().manual_seed(9)
    logits = (scale * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)).to(dtype)
    target = torch.randint(vocab, (rows,), generator=generator)
    target[1::4] = -100
    return logits, target


def _by_torch(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """`F.cross_entropy`, with tanh and the square of the log-sum-exp from their definitions."""
    if softcap is not None:
        powers = torch.exp(2 * logits / softcap)
        logits = softcap * (powers - 1) / (powers + 1)
    loss = F.cross_entropy(logits, target, label_smoothing=label_smoothing, reduction=reduction)
    counts = target != -100
    squares = (logits.exp().sum(-1).log() ** 2) * counts
    if reduction == "none":
        return loss + z_loss * squares
    return loss + z_loss * squares.sum() / (counts.sum() if reduction == "mean" else 1)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_reference_is_torchs(options: dict[str, Any], reduction: str) -> None:
    """In float64 the reference and its gradient are those of `torch.nn.functional.cross_entropy`."""
    logits, target = _inputs(dtype=torch.float64)
    logits.requires_grad_()
    wanted = _by_torch(logits, target, reduction=reduction, **options)
    got = cross_entropy_reference(logits, target, reduction=reduction, compute=torch.float64, **options)

    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)
    gradients = [torch.autograd.grad(loss, logits, torch.ones_like(loss) * 0.7) for loss in (got, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("vocab", [1, 300])
def test_the_kernel_is_torchs(options: dict[str, Any], reduction: str, vocab: int) -> None:
    """Loss and gradient of rows in one and in several blocks are those of torch in float64, to float32 accuracy."""
    logits, target = _inputs(vocab=vocab)
    exact = logits.double().requires_grad_()
    wanted = _by_torch(exact, target, reduction=reduction, **options)
    upstream = torch.linspace(-2, 3, 6)[: wanted.numel()].reshape(wanted.shape)

    got = cross_entropy(logits.requires_grad_(), target, reduction=reduction, **options)  # type: ignore[arg-type]

    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=2e-6, atol=2e-6)
    (dlogits,), (right,) = (torch.autograd.grad(y, x, upstream.to(y)) for y, x in ((got, logits), (wanted, exact)))
    torch.testing.assert_close(dlogits.double(), right, rtol=5e-6, atol=1e-7)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_large_logits_keep_their_digits(offset: float) -> None:
    """Gradients of logits near +-10000 are as accurate as those of the same logits near zero, smoothing included."""
    logits, target = _inputs(vocab=300)
    logits = (logits + offset).requires_grad_()
    exact = logits.detach().double().requires_grad_()

    pairs = [
        (loss, torch.autograd.grad(loss.sum(), x)[0])
        for x, function in ((logits, cross_entropy), (exact, _by_torch_shifted))
        for loss in [function(x, target, label_smoothing=0.1, reduction="none")]
    ]

    torch.testing.assert_close([t.double() for t in pairs[0]], list(pairs[1]), rtol=5e-6, atol=1e-6)


def _by_torch_shifted(logits: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits, target, **options)


@jit
def _cap_kernel(y_ptr: tl.tensor, x_ptr: tl.tensor, softcap: tl.tensor, BLOCK: tl.constexpr) -> None:
    lane = tl.arange(0, BLOCK)
    tl.store(y_ptr + lane, softcapped(tl.load(x_ptr + lane), softcap))


def test_softcap_keeps_the_digits_of_small_and_large_logits() -> None:
    """The cap is tanh within three units in the last place from 1e-30 to 1e30, of either sign, and keeps NaN."""
    x = torch.logspace(-30, 30, 4096, dtype=torch.float64).float()
    for sign in (1, -1):
        y = torch.empty_like(x)
        _cap_kernel[(1,)](y, sign * x, 1.0, BLOCK=4096)
        wanted = torch.tanh(sign * x.double())
        assert ((y.double() - wanted).abs() <= 3 * 2**-23 * wanted.abs()).all()
    _cap_kernel[(1,)](y, torch.full_like(x, float("nan")), 1.0, BLOCK=4096)
    assert y.isnan().all()


def test_ignored_rows_are_not_looked_at() -> None:
    """NaN and infinities in ignored rows reach neither the loss nor any gradient, which is 0 there."""
    logits, target = _inputs(vocab=300)
    clean = cross_entropy(logits, target)
    logits[target == -100] = torch.tensor([float("nan"), float("inf")]).repeat(150)
    logits.requires_grad_()

    loss = cross_entropy(logits, target, label_smoothing=0.0)
    (d,) = torch.autograd.grad(loss, logits)

    assert torch.equal(loss.detach(), clean)
    assert not d[target == -100].any()
    assert d.isfinite().all()


def test_nothing_counts() -> None:
    """Of rows that are all ignored the mean is NaN, as torch has it, the sum 0, and every gradient 0."""
    logits, target = _inputs()
    target.fill_(-100)
    logits.requires_grad_()

    assert cross_entropy(logits, target).isnan()
    assert F.cross_entropy(logits, target).isnan()
    assert cross_entropy(logits, target, reduction="sum") == 0
    for reduction in REDUCTIONS:
        loss = cross_entropy(logits, target, reduction=reduction)  # type: ignore[arg-type]
        (d,) = torch.autograd.grad(loss.sum(), logits)
        assert torch.equal(d, torch.zeros_like(d))


@pytest.mark.parametrize("label", [40, -1, -(2**63), 2**63 - 1])
def test_a_label_out_of_range_makes_its_row_nan(label: int) -> None:
    """Loss and gradient are NaN in the row of the wrong label, right in every other, and no memory outside is read:
    the row is the first or last of a tensor without a spare byte."""
    for place in (0, -1):
        logits, target = _inputs(rows=5)
        target[1], target[place] = 3, label
        logits.requires_grad_()

        loss = cross_entropy(logits, target, reduction="none")
        (d,) = torch.autograd.grad(loss.sum(), logits)

        wrong = torch.zeros(5, dtype=torch.bool)
        wrong[place] = True
        assert torch.equal(loss.isnan(), wrong)
        assert torch.equal(d.isnan(), wrong[:, None].expand_as(d))
        right = F.cross_entropy(logits[~wrong], target[~wrong], reduction="none")
        torch.testing.assert_close(loss[~wrong], right, rtol=1e-6, atol=1e-6)
        reference = cross_entropy_reference(logits, target, reduction="none")
        torch.testing.assert_close(loss, reference, rtol=1e-6, atol=1e-6, equal_nan=True)
        (right,) = torch.autograd.grad(reference.sum(), logits)
        torch.testing.assert_close(d, right, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_infinities_are_torchs(smoothing: float) -> None:
    """Rows with -inf at, beside or instead of everything, and with +inf or NaN, have the losses that torch gives."""
    logits, _ = _inputs(rows=6, vocab=300)
    logits[0, :128] = float("-inf")  # a whole block of the interpreter's
    logits[1, 7] = float("-inf")
    logits[2] = float("-inf")
    logits[3, 290] = float("inf")
    logits[4, 5] = float("nan")
    target = torch.tensor([200, 7, 0, 290, 6, 1])

    got = cross_entropy(logits, target, label_smoothing=smoothing, reduction="none")

    wanted = F.cross_entropy(logits, target, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_many_blocks_of_rows() -> None:
    """More rows than one step of the total takes are all added and counted, in the reference's mean and sum."""
    logits, target = _inputs(rows=4100, vocab=3)
    for reduction in ("mean", "sum"):
        got = cross_entropy(logits, target, reduction=reduction)
        wanted = F.cross_entropy(logits.double(), target, reduction=reduction)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=0)


def test_wide_rows_are_walked_through() -> None:
    """On a GPU a vocabulary of 128256 is walked through in steps of 2048; one program takes several short rows."""
    assert config(128256).loop
    wide, narrow = (config(width, interpreted=False) for width in (128256, 100))
    assert (wide.rows, wide.columns, wide.warps) == (1, 2048, 4)
    assert narrow.rows == 16


@pytest.mark.slow
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_opcheck(reduction: str) -> None:
    """Schema, fake kernels, autograd registration and tracing hold, of strided inputs and of none."""
    logits, target = _inputs(rows=4, vocab=5)
    strided = logits.t().contiguous().t().requires_grad_()
    options = (-100, 0.1, 0.01, 2.0, reduction)
    torch.library.opcheck(_cross_entropy, (strided, target.repeat(2)[::2], *options))
    if reduction != "mean":  # of no rows that is NaN, which opcheck finds different from itself
        torch.library.opcheck(_cross_entropy, (torch.empty(0, 5), target[:0], *options))
    _, statistics, count = _cross_entropy(logits, target, *options)
    upstream = torch.ones(4 if reduction == "none" else ())
    torch.library.opcheck(_cross_entropy_backward, (upstream, logits, target, statistics, count, *options))


@pytest.mark.slow
def test_one_graph() -> None:
    """The kernel and its gradient compile without a graph break."""
    logits, target = _inputs()
    logits.requires_grad_()

    def plain(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        rows = cross_entropy(logits, target, reduction="none", softcap=5.0)
        return cross_entropy(logits, target, label_smoothing=0.1) + rows.square().sum()

    whole = torch.compile(plain, fullgraph=True, backend="aot_eager")(logits, target)

    torch.testing.assert_close(whole, plain(logits, target), rtol=0, atol=0)
    got, wanted = (torch.autograd.grad(y, logits) for y in (whole, plain(logits, target)))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_second_derivative_is_refused() -> None:
    """The backward kernel has no gradient of its own, and says so instead of leaving a term out."""
    logits, target = _inputs()
    loss = cross_entropy(logits.requires_grad_(), target)
    (first,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(first.square().sum(), logits)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 4), (0,)])
def test_sizes_of_zero(shape: tuple[int, ...]) -> None:
    """No rows or no classes give the losses of the reference and empty gradients."""
    logits = torch.empty(shape, requires_grad=True)
    target = torch.zeros(shape[:-1], dtype=torch.int64)

    for reduction in REDUCTIONS:
        loss = cross_entropy(logits, target, reduction=reduction)  # type: ignore[arg-type]
        wanted = cross_entropy_reference(logits, target, reduction=reduction)
        torch.testing.assert_close(loss, wanted, rtol=0, atol=0, equal_nan=True)
        assert torch.autograd.grad(loss.sum(), logits)[0].shape == shape


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, "known: none, mean, sum", lambda x, t: cross_entropy(x, t, reduction="max")),  # type: ignore[arg-type]
        (TypeError, "logits is float64, allowed: float32", lambda x, t: cross_entropy(x.double(), t)),
        (TypeError, "target is int32, allowed: int64", lambda x, t: cross_entropy(x, t.int())),
        (TypeError, "target is float32", lambda x, t: cross_entropy(x, x)),
        (ValueError, "move the classes", lambda x, t: cross_entropy(x.mT, t)),
        (ValueError, r"shape \(6, 40\), target \(3,\)", lambda x, t: cross_entropy(x, t[:3])),
        (ValueError, r"shape \(\), target", lambda x, t: cross_entropy(x[0, 0], t[0])),
        (ValueError, "label_smoothing is 1.5, allowed: 0 to 1", lambda x, t: cross_entropy(x, t, label_smoothing=1.5)),
        (ValueError, "label_smoothing is nan", lambda x, t: cross_entropy(x, t, label_smoothing=float("nan"))),
        (ValueError, "z_loss is -1", lambda x, t: cross_entropy(x, t, z_loss=-1.0)),
        (ValueError, "softcap is 0", lambda x, t: cross_entropy(x, t, softcap=0.0)),
        (ValueError, "softcap is -3", lambda x, t: cross_entropy(x, t, softcap=-3.0)),
        (ValueError, "target is on meta", lambda x, t: cross_entropy(x, t.to("meta"))),
    ],
)
def test_what_is_refused(error: type[Exception], words: str, call: Callable[..., object]) -> None:
    """What the kernel does not support is refused in words, before anything is launched."""
    with pytest.raises(error, match=words):
        call(*_inputs())
