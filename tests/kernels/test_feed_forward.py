"""The feed-forward block beyond its spec: a second source of the reference, gradients, what is kept and refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from reference_kernels.glu import feed_forward, feed_forward_reference
from reference_kernels.glu.block import _feed_forward

ACTIVATIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x * torch.special.expit(x),
    "gelu": lambda x: x * torch.special.ndtr(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
}
SIZES = [(3, 5, 7, 4), (40, 100, 70, 33), (33, 600, 5, 1)]  # rows, k, n, o: in one tile, in several, and many steps


def _operands(rows: int, k: int, n: int, o: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """An input, two weights up, of which one lies the other way round, and one down."""
    generator = torch.Generator().manual_seed(13)
    shapes = (rows, k), (n, k), (k, n), (o, n)
    x, gate, up, down = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return [x, gate * max(k, 1) ** -0.5, up.t(), down]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("sizes", SIZES)
def test_three_layers_and_the_definition(sizes: tuple[int, int, int, int], activation: Any) -> None:
    """In float64 the reference, in float32 the kernel, are the textbook formula between three layers, and so are the
    gradients of all operands."""
    exact = [t.requires_grad_() for t in _operands(*sizes)]
    x, gate, up, down = exact
    (dy,) = (t.t() for t in torch.randn(1, sizes[3], sizes[0], dtype=torch.float64, generator=torch.Generator()))
    wanted = F.linear(ACTIVATIONS[activation](F.linear(x, gate)) * F.linear(x, up), down)
    gradients = torch.autograd.grad(wanted, exact, dy)
    narrow = [t.detach().float().requires_grad_() for t in exact]

    reference = feed_forward_reference(*exact, activation, torch.float64)  # type: ignore[call-arg]
    y = feed_forward(*narrow, activation)

    torch.testing.assert_close(reference, wanted)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.detach().abs().max()))
    for d, right in zip(torch.autograd.grad(y, narrow, dy.float()), gradients, strict=True):
        torch.testing.assert_close(d.double(), right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))


def test_training_changes_no_bit() -> None:
    """A result that is to be differentiated, for which the halves are kept, has the bits of one that is not."""
    operands = _operands(40, 100, 70, 33, torch.bfloat16)

    plain = feed_forward(*operands)
    operands[0].requires_grad_()

    assert torch.equal(feed_forward(*operands), plain)


def test_what_is_kept() -> None:
    """Backward of a block keeps its operands and two halves of 16 bits, and neither their product nor a copy."""
    x, *weights = (t.requires_grad_() for t in _operands(4, 6, 5, 3, torch.bfloat16))
    y = feed_forward(x, *weights)

    kept = [t for t in y.grad_fn.saved_tensors if t.data_ptr() not in [o.data_ptr() for o in (x, *weights)]]  # type: ignore[union-attr]

    assert [(t.shape, t.dtype) for t in kept] == [((4, 5), torch.bfloat16)] * 2


def test_gradients_that_nobody_asked_for() -> None:
    """Frozen operands change no bit of the gradients that are asked for."""
    operands = _operands(9, 40, 33, 7, torch.float32)

    def gradients(asked: list[int]) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_(i in asked) for i, t in enumerate(operands)]
        return list(torch.autograd.grad(feed_forward(*leaves).square().sum(), [leaves[i] for i in asked]))

    for number, d in enumerate(gradients([0, 1, 2, 3])):
        assert torch.equal(gradients([number])[0], d)


@pytest.mark.slow
def test_opcheck_and_one_graph() -> None:
    """Schema, fake kernel, autograd registration and tracing hold, and it compiles without a graph break."""
    operands = [t.requires_grad_() for t in _operands(4, 6, 5, 3, torch.float32)]
    torch.library.opcheck(_feed_forward, (*operands, "gelu", True))
    torch.library.opcheck(_feed_forward, (*(t.detach() for t in operands), "silu", False))

    whole = torch.compile(feed_forward, fullgraph=True, backend="aot_eager")(*operands)

    torch.testing.assert_close(whole, feed_forward(*operands), rtol=0, atol=0)
    got, wanted = (torch.autograd.grad(y.square().sum(), operands) for y in (whole, feed_forward(*operands)))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_second_derivative_is_refused() -> None:
    """The backward kernels have no gradient of their own, and say so instead of leaving a term out."""
    operands = [t.requires_grad_() for t in _operands(4, 6, 5, 3, torch.float32)]
    (first,) = torch.autograd.grad(feed_forward(*operands).square().sum(), operands[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(first.sum(), operands[0])


@pytest.mark.parametrize("sizes", [(0, 3, 4, 5), (3, 0, 4, 5), (3, 4, 0, 5), (3, 4, 5, 0)])
def test_sizes_of_zero(sizes: tuple[int, int, int, int]) -> None:
    """Nothing is zeros where nothing is summed; so are the gradients."""
    operands = [t.requires_grad_() for t in _operands(*sizes, torch.float32)]

    y = feed_forward(*operands)

    assert torch.equal(y, torch.zeros(sizes[0], sizes[3]))
    for leaf, d in zip(operands, torch.autograd.grad(y.sum(), operands), strict=True):
        assert torch.equal(d, torch.zeros_like(leaf))


def test_infinities_stay_in_their_rows() -> None:
    """NaN and infinity make no NaN of zeros beyond the end of rows, columns or depth."""
    x, gate, up, down = (t.abs() for t in _operands(4, 40, 33, 5, torch.float32))
    x[1, 2] = float("inf")

    y = feed_forward(x, gate, up, down)

    assert y[[0, 2, 3]].isfinite().all()
    assert torch.equal(y[1], torch.full((5,), float("inf")))


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, "known: silu, gelu, gelu_tanh", lambda x, w, d: feed_forward(x, w, w, d, "relu")),
        (TypeError, "feed_forward: x is float64, allowed: float32", lambda x, w, d: feed_forward(x.double(), w, w, d)),
        (TypeError, "down_weight is float16, allowed: float32", lambda x, w, d: feed_forward(x, w, w, d.half())),
        (ValueError, "they must be equal", lambda x, w, d: feed_forward(x, w, w[:2], d)),
        (ValueError, r"gate_weight \(4, 3\) do not fit", lambda x, w, d: feed_forward(x, w.t(), w, d)),
        (ValueError, r"down_weight \(3, 2\) and gate_weight", lambda x, w, d: feed_forward(x, w, w, d.t())),
        (ValueError, "down_weight is on meta", lambda x, w, d: feed_forward(x, w, w, d.to("meta"))),
    ],
)
def test_what_is_refused(error: type[Exception], words: str, call: Callable[..., object]) -> None:
    """What the block does not support is refused in words, before anything is launched."""
    with pytest.raises(error, match=words):
        call(torch.ones(2, 4), torch.ones(3, 4), torch.ones(2, 3))
