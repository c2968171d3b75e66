"""The layer_norm kernels beyond their specs: a second source of the reference, long rows, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from reference_kernels._common import Rows
from reference_kernels._norm_backward import config_backward, config_columns, config_stages
from reference_kernels.layer_norm import (
    add_layer_norm,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_reference,
)
from reference_kernels.layer_norm.kernel import _add_layer_norm, _layer_norm, _layer_norm_backward

WIDTHS = (1, 5, 100, 300)  # in one tile, and in a loop of several


def _inputs(rows: int, width: int, dtype: torch.dtype = torch.float32, offset: float = 0.0) -> list[torch.Tensor]:
    """x, residual, weight, bias, and upstream gradients of y and of the residual sum."""
    generator = torch.Generator().manual_seed(7)
    shapes = ((rows, width), (rows, width), (width,), (width,), (rows, width), (rows, width))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tensors[0] += offset
    return [tensor.to(dtype) for tensor in tensors]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_reference_is_torchs(width: int) -> None:
    """In float64 the reference and its gradients are those of `torch.nn.functional.layer_norm`."""
    x, residual, weight, bias, dy, dtotal = _inputs(4, width, torch.float64)
    leaves = [t.requires_grad_() for t in (x, residual, weight, bias)]

    got = add_layer_norm_reference(x, residual, weight, bias, 1e-3, torch.float64)

    wanted = F.layer_norm(x + residual, (width,), weight, bias, 1e-3), x + residual
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)
    gradients = [torch.autograd.grad(y, leaves, (dy, dtotal)) for y in (got, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-11)
    plain = layer_norm_reference(x, eps=1e-3, compute=torch.float64)
    torch.testing.assert_close(plain, F.layer_norm(x, (width,), eps=1e-3), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 70])
def test_the_kernels_are_torchs(rows: int, width: int) -> None:
    """Results and gradients, with and without a residual, of one and of several programs, are torch's in float64."""
    x, residual, weight, bias, dy, dtotal = _inputs(rows, width)
    leaves = [t.requires_grad_() for t in (x, residual, weight, bias)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    total = exact[0] + exact[1]
    norm = F.layer_norm(exact[0], (width,), exact[2], exact[3], 1e-2)
    norm_total = F.layer_norm(total, (width,), exact[2], exact[3], 1e-2)

    y = layer_norm(x, weight, bias, 1e-2)
    y_total, summed = add_layer_norm(x, residual, weight, bias, 1e-2)

    close = torch.testing.assert_close
    close([t.double() for t in (y, y_total, summed)], [norm, norm_total, total], rtol=5e-6, atol=5e-6)
    single = [leaves[i] for i in (0, 2, 3)], [exact[i] for i in (0, 2, 3)]
    got = [*torch.autograd.grad(y, single[0], dy), *torch.autograd.grad((y_total, summed), leaves, (dy, dtotal))]
    up = dy.double(), dtotal.double()
    right = [*torch.autograd.grad(norm, single[1], up[0]), *torch.autograd.grad((norm_total, total), exact, up)]
    close([t.double() for t in got], right, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("width", [64, 300])
def test_rows_far_from_zero_keep_their_digits(width: int) -> None:
    """Around 3000 with unit variance, result and input gradient are those of float64 to 2e-6 and 4e-6: the mean's own
    rounding, up to 1.2e-4, does not show."""
    x, _, _, _, dy, _ = _inputs(16, width, offset=3000.0)
    exact = x.double().requires_grad_()
    wanted = F.layer_norm(exact, (width,))

    y = layer_norm(x.requires_grad_())

    torch.testing.assert_close(y.double(), wanted, rtol=0, atol=2e-6)
    (dx,), (right,) = (torch.autograd.grad(a, b, c) for a, b, c in ((y, x, dy), (wanted, exact, dy.double())))
    torch.testing.assert_close(dx.double(), right, rtol=0, atol=4e-6)


def test_the_rounded_sum_is_what_is_normalised() -> None:
    """In bfloat16 ``y`` is the norm of the sum that is returned, not of the unrounded one."""
    x, residual, weight, bias, *_ = _inputs(5, 300, torch.bfloat16)

    y, total = add_layer_norm(x, residual, weight, bias)

    assert torch.equal(total, x + residual)
    assert torch.equal(y, layer_norm(total, weight, bias))


@pytest.mark.parametrize("asked", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("width", [100, 300])
def test_only_what_is_asked_for_is_summed(asked: tuple[bool, bool], width: int) -> None:
    """Weight or bias without a gradient get none, and the other's is the one that both would get."""
    x, _, weight, bias, dy, _ = _inputs(9, width)
    whole = torch.autograd.grad(
        layer_norm(x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()), (x, weight, bias), dy
    )
    weight, bias = weight.detach().requires_grad_(asked[0]), bias.detach().requires_grad_(asked[1])

    torch.autograd.backward(layer_norm(x, weight, bias), dy)

    for tensor, gradient in zip((x, weight, bias), whole, strict=True):
        assert (tensor.grad is None) != tensor.requires_grad
        assert tensor.grad is None or torch.equal(tensor.grad, gradient)


def test_a_result_that_nobody_used_takes_no_part() -> None:
    """Of ``y`` and the sum, the gradient of either alone is what zeros for the other would give."""
    x, residual, weight, bias, dy, dtotal = _inputs(5, 20)
    leaves = [t.requires_grad_() for t in (x, residual, weight, bias)]
    y, total = add_layer_norm(x, residual, weight, bias)

    of_total = torch.autograd.grad(total, leaves, dtotal, retain_graph=True, allow_unused=True)
    of_y = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    with_zeros = torch.autograd.grad((y, total), leaves, (dy, torch.zeros_like(dtotal)))

    assert torch.equal(of_total[0], dtotal)
    assert torch.equal(of_total[1], dtotal)
    assert not any(isinstance(d, torch.Tensor) for d in of_total[2:])
    assert all(torch.equal(a, b) for a, b in zip(of_y, with_zeros, strict=True))


def test_parts_follow_rows_and_processors() -> None:
    """Programs never outnumber tiles of rows; without a device the 132 multiprocessors of an H200 are assumed."""
    device = torch.device("cpu")
    for width, rows in ((100, 3), (100, 1000), (1000, 3), (1000, 1000)):
        columns, parts = config_columns(width, rows, device)
        assert 1 <= parts <= -(-rows // columns.rows)
        for stages in (1, 3):
            tile, programs = config_backward(width, rows, 4, device, stages)
            assert 1 <= programs <= -(-rows // tile.rows)


def test_only_what_is_read_in_vectors_goes_in_stages() -> None:
    """Rows of 2 bytes an element, too wide for several to a program and narrow enough for its registers, as they lie in
    memory; the widths of these tests do and do not."""
    wide = torch.empty(4, 9000, dtype=torch.bfloat16)

    def stages(*tensors: torch.Tensor, interpreted: bool = False) -> int:
        return config_stages(Rows.of(*tensors), tensors[0].element_size(), interpreted=interpreted)

    assert [stages(wide[:, :width].contiguous()) for width in (2048, 2064, 8192, 8200, 8208)] == [1, 3, 3, 1, 1]
    assert stages(wide[:, :4096].float().contiguous()) == 1
    even = wide[:, :4096].contiguous()
    late = torch.empty(4 * 4096 + 1, dtype=torch.bfloat16)[1:].view(4, 4096)
    assert stages(even, even) == 3
    assert [stages(even, other) for other in (wide[:, 4:4100], wide.view(9000, 4)[:4096].t(), late)] == [1, 1, 1]
    assert {stages(wide[:, :width], interpreted=True) for width in WIDTHS} == {1, 3}


@pytest.mark.slow
@pytest.mark.parametrize("width", [5, 300])
def test_opcheck(width: int) -> None:
    """Schema, fake kernels, autograd registration and tracing hold, of strided inputs and of nothing."""
    x, residual, weight, bias, dy, dtotal = _inputs(4, width)
    strided = x.t().contiguous().t().requires_grad_()
    torch.library.opcheck(_layer_norm, (strided, weight.requires_grad_(), None, 1e-5))
    torch.library.opcheck(_layer_norm, (torch.empty(3, 0), None, torch.empty(0), 1e-5))
    torch.library.opcheck(_add_layer_norm, (strided, residual, None, bias.requires_grad_(), 1e-5))
    _, statistics = _layer_norm(x, weight, bias, 1e-5)
    for upstream in (None, dtotal):
        torch.library.opcheck(
            _layer_norm_backward,
            (dy, upstream, *(t.detach() for t in (x, weight, bias)), statistics, True, upstream is None),
        )


@pytest.mark.slow
def test_one_graph() -> None:
    """Both kernels and their gradients compile without a graph break."""
    x, residual, weight, bias, *_ = _inputs(4, 6)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]

    def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y, total = add_layer_norm(x, residual, weight, bias)
        return (y * total + layer_norm(y, None, bias)).square()

    whole = torch.compile(plain, fullgraph=True, backend="aot_eager")(*leaves)

    torch.testing.assert_close(whole, plain(*leaves), rtol=0, atol=0)
    got, wanted = (torch.autograd.grad(y.sum(), leaves) for y in (whole, plain(*leaves)))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_second_derivative_is_refused() -> None:
    """The backward kernels have no gradient of their own, and say so instead of leaving a term out."""
    x, residual, *_ = _inputs(2, 8)
    for y in (layer_norm(x.requires_grad_()), add_layer_norm(x, residual)[0]):
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            torch.autograd.grad(first.square().sum(), x)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 4), (0, 300)])
def test_sizes_of_zero(shape: tuple[int, ...]) -> None:
    """Nothing gives nothing; gradients of weight and bias over no rows are zeros."""
    x = torch.empty(shape, requires_grad=True)
    weight, bias = (torch.ones(shape[-1], requires_grad=True) for _ in range(2))

    for y in (layer_norm(x, weight, bias), *add_layer_norm(x, x, weight, bias)):
        assert y.shape == shape
    y, total = add_layer_norm(x, x, weight, bias)
    gradients = torch.autograd.grad(y.sum() + total.sum(), (x, weight, bias))
    assert [d.shape for d in gradients] == [x.shape, weight.shape, bias.shape]
    assert not any(d.any() for d in gradients)


@pytest.mark.parametrize("width", [8, 300])
def test_infinities_are_torchs(width: int) -> None:
    """Rows with NaN or an infinity are NaN throughout, equal elements give the bias, and other rows are untouched."""
    x, _, weight, bias, *_ = _inputs(6, width)
    x[0, 3], x[1, -1], x[2, 0] = float("nan"), float("inf"), -float("inf")
    x[3] = 1e30

    y = layer_norm(x, weight, bias)

    assert torch.equal(y.isnan().all(-1), torch.tensor([True, True, True, False, False, False]))
    assert y[3:].isfinite().all()
    torch.testing.assert_close(y[4:], F.layer_norm(x, (width,), weight, bias)[4:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "layer_norm: x is float64, allowed: float32", lambda x, w: layer_norm(x.double(), w)),
        (TypeError, "weight is int64", lambda x, w: layer_norm(x, w.long())),
        (TypeError, "bias is float64", lambda x, w: layer_norm(x, w, w.double())),
        (TypeError, "residual is float16, allowed: float32", lambda x, w: add_layer_norm(x, x.half(), w)),
        (ValueError, "no dimension", lambda x, w: layer_norm(x[0, 0])),
        (ValueError, r"weight has shape \(3,\)", lambda x, w: layer_norm(x, w[:3])),
        (ValueError, r"bias has shape \(2, 4\)", lambda x, w: layer_norm(x, w, x)),
        (ValueError, "residual has shape", lambda x, w: add_layer_norm(x, x[:1], w)),
        (ValueError, "weight is on meta", lambda x, w: layer_norm(x, w.to("meta"))),
        (ValueError, "residual is on meta", lambda x, w: add_layer_norm(x, x.to("meta"))),
    ],
)
def test_what_is_refused(error: type[Exception], words: str, call: Callable[..., object]) -> None:
    """What the kernels do not support is refused in words, before anything is launched."""
    with pytest.raises(error, match=words):
        call(torch.ones(2, 4), torch.ones(4))
