"""The softmax kernels beyond their specs: second sources of the reference, masks by definition, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from reference_kernels.softmax import softmax, softmax_reference
from reference_kernels.softmax.backward import config_bias
from reference_kernels.softmax.kernel import _softmax, _softmax_backward
from reference_kernels.softmax.logits import Masking
from tests.philox import philox
from tests.sweeps import sweep

WIDTHS = (1, 5, 100, 300)  # in one tile, and in a loop of several


def _normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def _kept(shape: tuple[int, ...], seed: int, p: float) -> torch.Tensor:
    """What the kernel's card says of its mask, by Philox written in numpy: bool of ``shape``."""
    width = shape[-1]
    row, column = np.divmod(np.arange(np.prod(shape)), width)
    zeros = np.zeros(len(row))
    words = np.stack(
        philox((row * -(-width // 4) + column // 4, zeros, zeros, zeros), (seed % 2**32, seed >> 32), rounds=7)
    )
    return torch.from_numpy((words[column % 4, np.arange(len(row))] >> np.uint32(8)) >= round(p * 2**24)).view(shape)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_reference_is_attentions(width: int) -> None:
    """In float64 the reference is what torch's attention makes of values that are unit vectors: scale, additive and
    boolean masks, and a diagonal of 0."""
    query, key, bias = _normal((2, 3, 7, 4), (2, 3, width, 4), (2, 1, 7, width))
    keep = torch.rand(2, 1, 1, width, generator=torch.Generator().manual_seed(3)) < 0.7
    keep[..., 0] = True
    scores, units = query @ key.mT, torch.eye(width, dtype=torch.float64)
    for options, wanted in (
        ({"bias": bias}, {"attn_mask": bias}),
        ({"keep": keep}, {"attn_mask": keep}),
        ({"diagonal": 0}, {"is_causal": True}),
    ):
        right = F.scaled_dot_product_attention(query, key, units, scale=0.3, **wanted)
        got = softmax_reference(scores, 0.3, compute=torch.float64, **options)
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("diagonal", [None, 0, 3, -2])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_kernels_are_the_reference(width: int, p: float, diagonal: int | None) -> None:
    """Result and gradient, with every mask at once and an upstream gradient in another layout, are float64's; rows
    with nothing to keep are NaN, and the input's gradient is 0 there."""
    x, bias, dy = _normal((2, 3, 7, width), (3, 1, width), (7, width, 2, 3))
    dy = dy.permute(2, 3, 0, 1)
    keep = torch.rand(2, 1, 1, width, generator=torch.Generator().manual_seed(3)) < 0.7
    mask = _kept(tuple(x.shape), 7, p)
    exact = [t.requires_grad_() for t in (x, bias)]
    narrow = [t.detach().float().requires_grad_() for t in exact]
    wanted = softmax_reference(exact[0], -0.7, keep, exact[1], diagonal, p, 7, mask, torch.float64)

    y = softmax(narrow[0], -0.7, keep, narrow[1], diagonal, p, 7)

    torch.testing.assert_close(y.double(), wanted, rtol=3e-6, atol=1e-7, equal_nan=True)
    got, right = torch.autograd.grad(y, narrow, dy.float()), torch.autograd.grad(wanted, exact, dy)
    for d, r in zip(got, right, strict=True):
        torch.testing.assert_close(d.double(), r, rtol=2e-5, atol=2e-6, equal_nan=True)
    if diagonal == -2:
        assert wanted[:, :, 0][mask[:, :, 0]].isnan().all()
        assert not got[0][:, :, :2].any()


@pytest.mark.parametrize(
    "shape",
    [
        *[(9,), (2, 1, 1, 1, 9), (1, 3, 1, 2, 9), (2, 3, 1, 2, 9), (2, 3, 4, 2, 9)],
        *[(2, 1, 4, 1, 9), (1, 3, 1, 2, 9), (4, 1, 9), (3, 4, 2, 1), ()],
    ],
)
@pytest.mark.parametrize("strided", [False, True])
def test_a_bias_of_any_shape_has_its_gradient(shape: tuple[int, ...], strided: bool) -> None:
    """Whatever it is broadcast over, at the front, within, behind or along the row, and of tensors that do not fold."""
    bias, x, dy = _normal(shape, (2, 3, 4, 2, 9), (2, 3, 4, 2, 9))
    if strided:
        x, dy = (t.permute(3, 1, 0, 2, 4).contiguous().permute(2, 1, 3, 0, 4) for t in (x, dy))
    exact, narrow = bias.requires_grad_(), bias.detach().float().requires_grad_()
    mask = _kept((2, 3, 4, 2, 9), 5, 0.2)
    wanted = softmax_reference(x, 1.5, None, exact, 6, 0.2, 5, mask, torch.float64)

    y = softmax(x.float(), 1.5, None, narrow, 6, 0.2, 5)

    (got,), (right,) = torch.autograd.grad(y, narrow, dy.float()), torch.autograd.grad(wanted, exact, dy)
    assert got.shape == shape
    torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize(
    ("groups", "repeats", "width", "several"),
    [(1, 700, 5, True), (2, 150, 16, True), (3, 50, 70, False), (40, 3, 5, False), (9, 1, 300, False)],
)
def test_sums_for_the_bias_in_parts(groups: int, repeats: int, width: int, several: bool) -> None:
    """Few and many elements of a bias, broadcast over few and many rows, in one part and several: the sum of all."""
    x, bias, dy = _normal((repeats, groups, width), (groups, width), (repeats, groups, width))
    assert (config_bias(groups, repeats, width, interpreted=True)[1] > 1) == several
    exact, narrow = bias.requires_grad_(), bias.detach().float().requires_grad_()

    (got,) = torch.autograd.grad(softmax(x.float(), bias=narrow), narrow, dy.float())

    (right,) = torch.autograd.grad(softmax_reference(x, bias=exact, compute=torch.float64), exact, dy)
    torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 5 * 2**32 + 17, 2**63 - 1])
@pytest.mark.parametrize("width", [7, 300])
def test_the_mask_is_philox(width: int, seed: int) -> None:
    """An element is kept where its word of Philox says so: in one tile and in a loop, forward and backward."""
    x = torch.zeros(11, width, requires_grad=True)
    kept = _kept((11, width), seed, 0.3)

    y = softmax(x, dropout_p=0.3, seed=seed)
    (dx,) = torch.autograd.grad(y[:, 0].sum(), x)

    torch.testing.assert_close(y, kept / (0.7 * width), rtol=1e-6, atol=0)
    share = torch.zeros(width)
    share[0] = 1.0
    torch.testing.assert_close(dx, kept[:, :1] * (share - 1 / width) / (0.7 * width), rtol=2e-6, atol=1e-9)


def test_the_mask_knows_elements_by_place_alone() -> None:
    """Layout, dtype, other masks and leading dimensions change nothing of it; the ends of p keep all and nothing."""
    plain = torch.ones(6, 50, 40)
    wanted = softmax(plain, dropout_p=0.5, seed=11) != 0

    for x in (plain.bfloat16(), torch.ones(40, 50, 6).permute(2, 1, 0), torch.ones(6, 50, 80)[..., ::2]):
        assert torch.equal(softmax(x, dropout_p=0.5, seed=11) != 0, wanted)
    assert torch.equal(softmax(plain.view(300, 40), dropout_p=0.5, seed=11) != 0, wanted.view(300, 40))
    assert torch.equal(softmax(plain, diagonal=0, dropout_p=0.5, seed=11) != 0, wanted.tril())
    assert not torch.equal(softmax(plain, dropout_p=0.5, seed=12) != 0, wanted)
    assert torch.equal(softmax(plain, dropout_p=0.0, seed=11), softmax(plain))
    assert torch.equal(softmax(plain * torch.nan, dropout_p=1.0), plain * 0)


@pytest.mark.parametrize("width", [8, 300])
def test_what_is_masked_has_no_say(width: int) -> None:
    """NaN and infinities where nothing is kept change neither result nor gradient, and their own gradient is 0."""
    x, dy = _normal((4, width), (4, width), dtype=torch.float32)
    keep = torch.ones(4, width, dtype=torch.bool).tril(width - 4)
    found = []
    for value in (0.0, float("nan"), float("inf")):
        leaf = x.masked_fill(~keep, value).requires_grad_()
        for options in ({"keep": keep}, {"diagonal": width - 4}):
            y = softmax(leaf, **options)
            found.append((y.detach(), torch.autograd.grad(y, leaf, dy.masked_fill(~keep, value))[0]))

    for y, dx in found:
        assert torch.equal(y, found[0][0])
        assert torch.equal(dx, found[0][1])
    assert not found[0][1][~keep].any()


@pytest.mark.parametrize("width", [8, 300])
def test_infinities_are_torchs(width: int) -> None:
    """Rows with NaN, with ``inf`` or of nothing but ``-inf`` are NaN as torch's, and so are their gradients."""
    x, dy = _normal((5, width), (5, width), dtype=torch.float32)
    x[0, 3], x[1, 2], x[2], x[3, :-1] = float("nan"), float("inf"), -float("inf"), -float("inf")
    x.requires_grad_()
    found = [(y.detach(), torch.autograd.grad(y, x, dy)[0]) for y in (softmax(x), F.softmax(x, -1))]

    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6, equal_nan=True)
    assert found[0][0].isnan().any(-1).tolist() == [True, True, True, False, False]


@sweep("width", [5, 300])
def test_opcheck(width: int) -> None:
    """Schema, fake kernels, autograd registration and tracing hold, of strided inputs and of nothing."""
    x, bias, dy = _normal((width, 4), (width,), (4, width), dtype=torch.float32)
    strided, keep = x.t().requires_grad_(), torch.ones(1, width, dtype=torch.bool)
    torch.library.opcheck(_softmax, (strided, 0.5, keep, bias.requires_grad_(), 0, 3, 0.25))
    torch.library.opcheck(_softmax, (strided, 1.0, None, None, None, 0, 0.0))
    torch.library.opcheck(_softmax, (torch.empty(3, 0), 1.0, None, torch.empty(0), None, 0, 0.0))
    rest: tuple[Any, ...] = (strided.detach(), keep, bias.detach(), 0.5, 0, 3, 0.25)
    for of_bias in (True, False):
        torch.library.opcheck(_softmax_backward, (dy, *rest, of_bias))


def test_one_graph() -> None:
    """The kernel and its gradients compile without a graph break."""
    x, bias = _normal((4, 6, 6), (6,), dtype=torch.float32)
    leaves = [x.requires_grad_(), bias.requires_grad_()]

    def plain(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return softmax(softmax(x, 0.5, None, bias, 0), dropout_p=0.25, seed=9).square()

    whole = torch.compile(plain, fullgraph=True, backend="aot_eager")(*leaves)

    torch.testing.assert_close(whole, plain(*leaves), rtol=0, atol=0)
    got, wanted = (torch.autograd.grad(y.sum(), leaves) for y in (whole, plain(*leaves)))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_second_derivative_is_refused() -> None:
    """The backward kernels have no gradient of their own, and say so instead of leaving a term out."""
    x = torch.randn(2, 8, requires_grad=True)
    (first,) = torch.autograd.grad(softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(first.square().sum(), x)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 4), (0, 300)])
def test_sizes_of_zero(shape: tuple[int, ...]) -> None:
    """Nothing gives nothing; the bias's gradient over no rows is zeros."""
    x, bias = torch.empty(shape, requires_grad=True), torch.ones(shape[-1], requires_grad=True)

    y = softmax(x, bias=bias, diagonal=None if len(shape) < 2 else 0, dropout_p=0.5)

    assert y.shape == shape
    gradients = torch.autograd.grad(y.sum(), (x, bias))
    assert [d.shape for d in gradients] == [x.shape, bias.shape]
    assert not any(d.any() for d in gradients)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "softmax: x is float64, allowed: float32", lambda x: softmax(x.double())),
        (TypeError, "keep is float32, allowed: bool", lambda x: softmax(x, 1.0, x)),
        (TypeError, "bias is int64", lambda x: softmax(x, bias=x.long())),
        (ValueError, "x has no dimension", lambda x: softmax(x[0, 0])),
        (ValueError, "no rows and columns", lambda x: softmax(x[0], diagonal=0)),
        (ValueError, "supported: -2", lambda x: softmax(x, diagonal=2**31)),
        (ValueError, r"bias of shape \(3,\) does not broadcast", lambda x: softmax(x, bias=x[0, :3])),
        (ValueError, "bias is on meta", lambda x: softmax(x, bias=x.to("meta"))),
        (TypeError, "seed is True", lambda x: softmax(x, seed=True)),
        (ValueError, "seed is -1, supported: 0 to", lambda x: softmax(x, seed=-1)),
        (ValueError, "dropout_p is 1.5, supported: 0 to 1", lambda x: softmax(x, dropout_p=1.5)),
    ],
)
def test_what_is_refused(error: type[Exception], words: str, call: Callable[[torch.Tensor], object]) -> None:
    """What the kernels do not support is refused in words, before anything is launched."""
    with pytest.raises(error, match=words):
        call(torch.ones(2, 4))


def test_a_mask_of_one_row_has_the_strides_of_more() -> None:
    """What Triton knows of a stride decides in which order a row is summed; torch gives a lone row another one."""
    keep = torch.ones(4, dtype=torch.bool)
    masking = Masking(keep, None, 1.0, None, 0, 0.0)
    one, two = (masking.as_rows(torch.zeros(rows, 4))[1] for rows in (1, 2))
    assert one.stride() == two.stride() == (0, 1)
    assert torch.equal(one, keep.view(torch.uint8).expand(1, 4))
