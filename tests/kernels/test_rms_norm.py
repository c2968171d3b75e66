"""The rms_norm kernels beyond their specs: a second source of the references, long rows, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from reference_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from reference_kernels.rms_norm.kernel import _add_rms_norm, _rms_norm, _rms_norm_backward

WIDTHS = (1, 5, 100, 300)  # in one tile, and in a loop of several
CONVENTIONS = ("llama", "gemma", "torch")


def _inputs(rows: int, width: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """x, residual, weight, and upstream gradients of y and of the residual sum."""
    generator = torch.Generator().manual_seed(7)
    shapes = ((rows, width), (rows, width), (width,), (rows, width), (rows, width))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_reference_is_torchs(width: int, convention: str) -> None:
    """In float64, where nothing is rounded, the references and their gradients are `torch.nn.functional.rms_norm`'s,
    Gemma's with a weight that is one more."""
    x, residual, weight, dy, dtotal = _inputs(4, width, torch.float64)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]

    got = add_rms_norm_reference(x, residual, weight, 1e-3, convention, torch.float64)

    wanted = F.rms_norm(x + residual, (width,), weight + (convention == "gemma"), 1e-3), x + residual
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)
    gradients = [torch.autograd.grad(y, leaves, (dy, dtotal)) for y in (got, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-11)
    plain = rms_norm_reference(x, None, 1e-3, convention, torch.float64)
    torch.testing.assert_close(plain, F.rms_norm(x, (width,), None, 1e-3), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 70])
def test_the_kernels_are_torchs(rows: int, width: int, convention: str) -> None:
    """Results and gradients, with and without a residual, of one and of several programs, are torch's in float64."""
    x, residual, weight, dy, dtotal = _inputs(rows, width)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    total, factor = exact[0] + exact[1], exact[2] + (convention == "gemma")
    norm, norm_total = (F.rms_norm(t, (width,), factor, 1e-2) for t in (exact[0], total))

    y = rms_norm(x, weight, 1e-2, convention)  # type: ignore[arg-type]
    y_total, summed = add_rms_norm(x, residual, weight, 1e-2, convention)  # type: ignore[arg-type]

    close = torch.testing.assert_close
    close([t.double() for t in (y, y_total, summed)], [norm, norm_total, total], rtol=5e-6, atol=5e-6)
    single = (leaves[0], leaves[2]), (exact[0], exact[2])
    got = [*torch.autograd.grad(y, single[0], dy), *torch.autograd.grad((y_total, summed), leaves, (dy, dtotal))]
    up = dy.double(), dtotal.double()
    right = [
        *torch.autograd.grad(norm, single[1], up[0], retain_graph=True),
        *torch.autograd.grad((norm_total, total), exact, up),
    ]
    close([t.double() for t in got], right, rtol=2e-5, atol=2e-5)


def test_the_conventions_round_where_they_say() -> None:
    """In bfloat16 Llama rounds before it multiplies, the others after: the results differ, each from the others."""
    x, _, weight, *_ = _inputs(9, 300, torch.bfloat16)
    normalised = F.rms_norm(x.double(), (300,), None, 1e-6)
    wanted = {
        "llama": normalised.bfloat16() * weight,
        "gemma": (normalised * (1 + weight.double())).bfloat16(),
        "torch": (normalised * weight.double()).bfloat16(),
    }
    for convention in CONVENTIONS:
        y = rms_norm(x, weight, 1e-6, convention)  # type: ignore[arg-type]
        assert [(y == right).float().mean() > 0.99 for right in wanted.values()] == [
            convention == name for name in wanted
        ]


def test_the_rounded_sum_is_what_is_normalised() -> None:
    """In bfloat16 ``y`` is the norm of the sum that is returned, not of the unrounded one."""
    x, residual, weight, *_ = _inputs(5, 300, torch.bfloat16)

    y, total = add_rms_norm(x, residual, weight)

    assert torch.equal(total, x + residual)
    assert torch.equal(y, rms_norm(total, weight))


@pytest.mark.parametrize("width", [100, 300])
def test_only_what_is_asked_for_is_summed(width: int) -> None:
    """A weight without a gradient gets none, and the input's is the one that both would get."""
    x, _, weight, dy, _ = _inputs(9, width)
    whole = torch.autograd.grad(rms_norm(x.requires_grad_(), weight.requires_grad_()), (x, weight), dy)

    torch.autograd.backward(rms_norm(x, weight.detach()), dy)
    torch.autograd.backward(rms_norm(x.detach(), weight), dy)

    assert x.grad is not None
    assert weight.grad is not None
    assert torch.equal(x.grad, whole[0])
    assert torch.equal(weight.grad, whole[1])


def test_a_result_that_nobody_used_takes_no_part() -> None:
    """Of ``y`` and the sum, the gradient of either alone is what zeros for the other would give."""
    x, residual, weight, dy, dtotal = _inputs(5, 20)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    y, total = add_rms_norm(x, residual, weight)

    of_total = torch.autograd.grad(total, leaves, dtotal, retain_graph=True, allow_unused=True)
    of_y = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    with_zeros = torch.autograd.grad((y, total), leaves, (dy, torch.zeros_like(dtotal)))

    assert torch.equal(of_total[0], dtotal)
    assert torch.equal(of_total[1], dtotal)
    assert not isinstance(of_total[2], torch.Tensor)
    assert all(torch.equal(a, b) for a, b in zip(of_y, with_zeros, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("width", [5, 300])
def test_opcheck(width: int) -> None:
    """Schema, fake kernels, autograd registration and tracing hold, of strided inputs and of nothing."""
    x, residual, weight, dy, dtotal = _inputs(4, width)
    strided = x.t().contiguous().t().requires_grad_()
    torch.library.opcheck(_rms_norm, (strided, weight.requires_grad_(), 1e-5, "gemma"))
    torch.library.opcheck(_rms_norm, (torch.empty(3, 0), torch.empty(0), 1e-5, "llama"))
    torch.library.opcheck(_add_rms_norm, (strided, residual, None, 1e-5, "torch"))
    _, statistics = _rms_norm(x, weight, 1e-5, "torch")
    for upstream in (None, dtotal):
        torch.library.opcheck(
            _rms_norm_backward, (dy, upstream, x.detach(), weight.detach(), statistics, "gemma", upstream is None)
        )


@pytest.mark.slow
def test_one_graph() -> None:
    """Both kernels and their gradients compile without a graph break."""
    x, residual, weight, *_ = _inputs(4, 6)
    leaves = [t.requires_grad_() for t in (x, weight)]

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, total = add_rms_norm(x, residual, weight)
        return (y * total + rms_norm(y, weight, convention="gemma")).square()

    whole = torch.compile(plain, fullgraph=True, backend="aot_eager")(*leaves)

    torch.testing.assert_close(whole, plain(*leaves), rtol=0, atol=0)
    got, wanted = (torch.autograd.grad(y.sum(), leaves) for y in (whole, plain(*leaves)))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_second_derivative_is_refused() -> None:
    """The backward kernels have no gradient of their own, and say so instead of leaving a term out."""
    x, residual, *_ = _inputs(2, 8)
    for y in (rms_norm(x.requires_grad_()), add_rms_norm(x, residual)[0]):
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            torch.autograd.grad(first.square().sum(), x)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 4), (0, 300)])
def test_sizes_of_zero(shape: tuple[int, ...]) -> None:
    """Nothing gives nothing; the weight's gradient over no rows is zeros."""
    x, weight = torch.empty(shape, requires_grad=True), torch.ones(shape[-1], requires_grad=True)

    for y in (rms_norm(x, weight), *add_rms_norm(x, x, weight)):
        assert y.shape == shape
    y, total = add_rms_norm(x, x, weight)
    gradients = torch.autograd.grad(y.sum() + total.sum(), (x, weight))
    assert [d.shape for d in gradients] == [x.shape, weight.shape]
    assert not any(d.any() for d in gradients)


@pytest.mark.parametrize("width", [8, 300])
def test_numbers_out_of_range_are_as_the_card_says(width: int) -> None:
    """NaN spreads over its row, an infinity is NaN among zeros, squares past float32's range give zeros."""
    x, *_ = _inputs(5, width)
    x[0, 3], x[1, 2], x[2, 0] = float("nan"), float("inf"), 1e30

    y = rms_norm(x)

    assert y[0].isnan().all()
    assert y[1].isnan().nonzero().tolist() == [[2]]
    assert torch.equal(y[2], torch.zeros(width))
    assert y[3:].isfinite().all()


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "rms_norm: x is float64, allowed: float32", lambda x, w: rms_norm(x.double(), w)),
        (TypeError, "weight is float16, allowed: float32;", lambda x, w: rms_norm(x, w.half())),
        (TypeError, "weight is int64", lambda x, w: rms_norm(x, w.long(), convention="torch")),
        (TypeError, "residual is float16, allowed: float32", lambda x, w: add_rms_norm(x, x.half(), w)),
        (ValueError, "no dimension", lambda x, w: rms_norm(x[0, 0])),
        (ValueError, r"weight has shape \(3,\)", lambda x, w: rms_norm(x, w[:3])),
        (ValueError, "residual has shape", lambda x, w: add_rms_norm(x, x[:1], w)),
        (ValueError, "known: llama, gemma, torch", lambda x, w: rms_norm(x, w, convention="t5")),  # type: ignore[arg-type]
        (ValueError, "weight is on meta", lambda x, w: rms_norm(x, w.to("meta"))),
        (ValueError, "residual is on meta", lambda x, w: add_rms_norm(x, x.to("meta"))),
    ],
)
def test_what_is_refused(error: type[Exception], words: str, call: Callable[..., object]) -> None:
    """What the kernels do not support is refused in words, before anything is launched."""
    with pytest.raises(error, match=words):
        call(torch.ones(2, 4), torch.ones(4))
