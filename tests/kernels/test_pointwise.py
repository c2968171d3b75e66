"""The pointwise kernels beyond their specs: a second source of the references, registration, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from reference_kernels.pointwise import (
    add_mul_act,
    add_mul_act_reference,
    dropout,
    dropout_reference,
    relu_scale_bias,
    relu_scale_bias_reference,
)
from reference_kernels.pointwise.kernel import _add_mul_act, _relu_scale_bias, backward_config
from reference_kernels.pointwise.seeded_dropout import _dropout
from tests.philox import philox

# Each activation from its definition, with functions that the reference does not use.
BY_DEFINITION: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": lambda x: (x + x.abs()) / 2,
    "gelu": lambda x: x * torch.special.ndtr(x),
    "silu": lambda x: x * torch.special.expit(x),
}


def _normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def _kept(count: int, seed: int, p: float) -> torch.Tensor:
    """What the kernel's card says of its mask, by Philox written in numpy: bool ``(count,)``."""
    element = np.arange(count)
    counter, word = np.divmod(element, 4)
    zeros = np.zeros(count)
    words = np.stack(philox((counter, zeros, zeros, zeros), (seed % 2**32, seed >> 32), rounds=7))
    return torch.from_numpy((words[word, element] >> np.uint32(8)) >= round(p * 2**24))


@pytest.mark.parametrize("activation", BY_DEFINITION)
def test_add_mul_act_is_the_definition(activation: str) -> None:
    """The reference in float64 and the kernel in float32 have the results and gradients of the textbook formula."""
    exact = [t.requires_grad_() for t in _normal(*[(3, 300)] * 3, dtype=torch.float64)]
    x, y, z = exact
    (dout,) = _normal((3, 300), dtype=torch.float64)
    wanted = BY_DEFINITION[activation]((x + y) * z)
    gradients = torch.autograd.grad(wanted, exact, dout)
    narrow = [t.detach().float().requires_grad_() for t in exact]

    reference = add_mul_act_reference(x, y, z, activation, torch.float64)
    got = add_mul_act(*narrow, activation=activation)  # type: ignore[arg-type]

    torch.testing.assert_close(reference, wanted, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(torch.autograd.grad(reference, exact, dout), gradients, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(got.double(), wanted, rtol=3e-6, atol=3e-6)
    for result, right in zip(torch.autograd.grad(got, narrow, dout.float()), gradients, strict=True):
        torch.testing.assert_close(result.double(), right, rtol=3e-6, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 7, 400])
def test_relu_scale_bias_is_the_definition(rows: int) -> None:
    """Results, and gradients written down by hand, in float64; many rows are summed by several programs in turns."""
    x, dy, scale, bias = _normal((rows, 70), (rows, 70), (70,), (70,), dtype=torch.float64)
    positive = (x + x.abs()) / 2
    wanted = positive * scale + bias
    gradients = (dy * scale * (x > 0), (dy * positive).sum(0), dy.sum(0))
    exact = [t.clone().requires_grad_() for t in (x, scale, bias)]
    narrow = [t.float().requires_grad_() for t in (x, scale, bias)]
    if rows == 400:
        tile, rows_each = backward_config(rows, 70, torch.float32, interpreted=True)
        assert tile.rows < rows_each < rows

    reference = relu_scale_bias_reference(*exact, torch.float64)
    got = relu_scale_bias(*narrow)

    torch.testing.assert_close(reference, wanted, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(torch.autograd.grad(reference, exact, dy), gradients, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(got.double(), wanted, rtol=2e-6, atol=1e-6)
    for result, right in zip(torch.autograd.grad(got, narrow, dy.float()), gradients, strict=True):
        torch.testing.assert_close(result.double(), right, rtol=2e-6, atol=1e-5)


def test_a_closed_relu_stops_gradients_that_are_not_finite() -> None:
    """At and below 0 nothing flows back, be it NaN or infinite; at NaN the gradient flows, as torch's own."""
    x = torch.tensor([[-1.0, 0.0, 2.0, torch.nan]])
    ones = torch.ones(4)
    dy = torch.tensor([[torch.nan, torch.inf, 3.0, 5.0]])
    found = []
    for function in (relu_scale_bias, relu_scale_bias_reference):
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(function(leaf, ones, ones), leaf, dy)[0])

    torch.testing.assert_close(found[0], torch.tensor([[0.0, 0.0, 3.0, 5.0]]), rtol=0, atol=0)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 5 * 2**32 + 17, 2**63 - 1])
def test_the_mask_is_philox(seed: int) -> None:
    """An element is kept where its word of Philox says so: in two blocks, forward and backward."""
    (x,) = _normal((3, 2000))
    x.requires_grad_()
    kept = _kept(x.numel(), seed, 0.3).view(x.shape)
    assert 0.68 < kept.float().mean() < 0.72

    y = dropout(x, seed, 0.3)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(x))

    exact = dropout_reference(x.double(), seed, 0.3, kept, torch.float64)
    torch.testing.assert_close(exact, torch.where(kept, x.double() / 0.7, torch.zeros(())), rtol=1e-15, atol=0)
    torch.testing.assert_close(y.double(), exact, rtol=3e-7, atol=0)
    assert torch.equal(dx != 0, kept)


def test_the_mask_knows_elements_by_number_alone() -> None:
    """Layout, dtype and shape change nothing of it; the ends of p keep all and nothing."""
    plain = torch.ones(6, 50, 40)
    wanted = dropout(plain, 11, 0.5) != 0

    for x in (plain.bfloat16(), torch.ones(40, 50, 6).permute(2, 1, 0), torch.ones(6, 50, 80)[..., ::2]):
        assert torch.equal(dropout(x, 11, 0.5) != 0, wanted)
    assert torch.equal(dropout(plain.view(-1), 11, 0.5) != 0, wanted.view(-1))
    assert not torch.equal(dropout(plain, 12, 0.5) != 0, wanted)
    assert torch.equal(dropout(plain, 11, 0.0), plain)
    assert torch.equal(dropout(plain * torch.nan, 11, 1.0), plain * 0)


@pytest.mark.slow
def test_opcheck() -> None:
    """Schema, fake kernel, autograd registration and tracing hold for all operators, strided inputs included."""
    x, y, z, vector = _normal((4, 6), (4, 6), (4, 6), (4,))
    x, y, z = (t.t().requires_grad_() for t in (x, y, z))
    torch.library.opcheck(_relu_scale_bias, (x, vector.requires_grad_(), vector.detach().half().requires_grad_()))
    torch.library.opcheck(_add_mul_act, (x, y, z, "gelu"))
    torch.library.opcheck(_dropout, (x, 3, 0.25))
    torch.library.opcheck(_dropout, (torch.empty(0, 6), 3, 0.25))


@pytest.mark.slow
def test_one_graph() -> None:
    """All kernels and their gradients compile without a graph break."""
    x, y, z, vector = _normal((4, 6), (4, 6), (4, 6), (6,))
    x.requires_grad_()

    def plain(x: torch.Tensor) -> torch.Tensor:
        return dropout(add_mul_act(relu_scale_bias(x, vector, vector), y, z, "silu"), 9, 0.25)

    whole = torch.compile(plain, fullgraph=True, backend="aot_eager")(x)

    torch.testing.assert_close(whole, plain(x), rtol=0, atol=0)
    got, wanted = (torch.autograd.grad(out.sum(), x) for out in (whole, plain(x)))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_second_derivatives() -> None:
    """The chains refuse one instead of leaving a term out; dropout is linear and has derivatives of every order."""
    x, y = (t.requires_grad_() for t in _normal((2, 8), (8,)))
    for out in (relu_scale_bias(x, y, y), add_mul_act(x, x, x)):
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            torch.autograd.grad(first.sum(), x)

    out = dropout(x, 4, 0.5)
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 8.0 * (out != 0), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 4)])
def test_nothing_gives_nothing(shape: tuple[int, ...]) -> None:
    """Sizes of zero give empty results; sums over no rows are zero."""
    x, vector = torch.empty(shape, requires_grad=True), torch.ones(shape[-1:], requires_grad=True)

    for out in (relu_scale_bias(x, vector, vector), add_mul_act(x, x, x), dropout(x, 1, 0.5)):
        assert out.shape == shape
        assert torch.autograd.grad(out.sum(), x)[0].shape == shape
    (sums,) = torch.autograd.grad(relu_scale_bias(x, vector, vector.detach()).sum(), vector)
    assert torch.equal(sums, torch.zeros(shape[-1:]))


def test_dropout_of_a_number() -> None:
    """A tensor without a dimension is one element."""
    assert dropout(torch.tensor(3.0), 5, 0.0).item() == 3.0


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "x is float64, allowed: float32", lambda x: relu_scale_bias(x.double(), x[0], x[0])),
        (TypeError, "bias is int64", lambda x: relu_scale_bias(x, x[0], x[0].long())),
        (ValueError, "no dimension", lambda x: relu_scale_bias(x[0, 0], x[0], x[0])),
        (ValueError, r"scale has shape \(2,\), the last dimension", lambda x: relu_scale_bias(x, x[:, 0], x[0])),
        (ValueError, "bias is on meta", lambda x: relu_scale_bias(x, x[0], x[0].to("meta"))),
        (ValueError, "known: relu, gelu, silu", lambda x: add_mul_act(x, x, x, "tanh")),  # type: ignore[arg-type]
        (TypeError, "z is float16, allowed: float32", lambda x: add_mul_act(x, x, x.half())),
        (ValueError, "they must be equal", lambda x: add_mul_act(x, x[:1], x)),
        (ValueError, "add_mul_act: x has no dimension", lambda x: add_mul_act(x[0, 0], x, x)),
        (TypeError, "x is int64", lambda x: dropout(x.long(), 1)),
        (TypeError, "give a whole number", lambda x: dropout(x, 0.5)),  # type: ignore[arg-type]
        (TypeError, "seed is True", lambda x: dropout(x, True)),
        (ValueError, "seed is -1, supported: 0 to", lambda x: dropout(x, -1)),
        (ValueError, "supported: 0 to", lambda x: dropout(x, 2**63)),
        (ValueError, "p is 1.5, supported: 0 to 1", lambda x: dropout(x, 1, 1.5)),
        (ValueError, "p is nan", lambda x: dropout(x, 1, float("nan"))),
    ],
)
def test_what_is_refused(error: type[Exception], words: str, call: Callable[[torch.Tensor], object]) -> None:
    """What the kernels do not support is refused in words, before anything is launched."""
    with pytest.raises(error, match=words):
        call(torch.ones(2, 4))
