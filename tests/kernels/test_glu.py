"""The glu kernels beyond their specs: a second source of the reference, registration, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from reference_kernels.glu import glu, glu_packed, glu_packed_reference, glu_reference
from reference_kernels.glu.kernel import _glu, _glu_packed

# Each activation from its definition, with functions that the reference does not use.
BY_DEFINITION: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x * torch.special.expit(x),
    "gelu": lambda x: x * torch.special.ndtr(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
}


def _halves(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    gate, up = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return gate, up


@pytest.mark.parametrize("activation", BY_DEFINITION)
def test_the_reference_is_the_definition(activation: str) -> None:
    """In float64 the reference and its gradients are those of the textbook formula, in both layouts."""
    gate, up = (t.requires_grad_() for t in _halves(5, 40, dtype=torch.float64))
    dy, _ = _halves(5, 40, dtype=torch.float64)
    wanted = BY_DEFINITION[activation](gate) * up
    gradients = torch.autograd.grad(wanted, (gate, up), dy)

    got = glu_reference(gate, up, activation, torch.float64)
    packed = torch.cat((gate, up), -1).detach().requires_grad_()
    from_packed = glu_packed_reference(packed, activation, torch.float64)

    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(from_packed, wanted, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(torch.autograd.grad(got, (gate, up), dy), gradients, rtol=1e-12, atol=1e-13)
    (dx,) = torch.autograd.grad(from_packed, packed, dy)
    torch.testing.assert_close(dx, torch.cat(gradients, -1), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("activation", BY_DEFINITION)
def test_the_kernel_is_the_definition(activation: str) -> None:
    """Results and gradients of both kernels are the float64 formula's to float32 accuracy."""
    gate, up = _halves(3, 300)
    dy, _ = _halves(3, 300)
    exact = [t.double().requires_grad_() for t in (gate, up)]
    wanted = BY_DEFINITION[activation](exact[0]) * exact[1]
    gradients = torch.autograd.grad(wanted, exact, dy.double())

    for t in (gate, up):
        t.requires_grad_()
    got = glu(gate, up, activation)  # type: ignore[arg-type]
    packed = torch.cat((gate, up), -1).detach().requires_grad_()
    from_packed = glu_packed(packed, activation)  # type: ignore[arg-type]

    for result, right in (
        (got, wanted),
        (from_packed, wanted),
        *zip(torch.autograd.grad(got, (gate, up), dy), gradients, strict=True),
        (torch.autograd.grad(from_packed, packed, dy)[0], torch.cat(gradients, -1)),
    ):
        torch.testing.assert_close(result.double(), right, rtol=2e-6, atol=1e-6)


def test_saturated_gates_stay_finite() -> None:
    """Gates far beyond exp's range give 0 or themselves, with slopes of 0 or 1, in every activation."""
    for activation in BY_DEFINITION:
        gate = torch.tensor([-1e4, -200.0, -89.0, 0.0, 89.0, 200.0, 1e4], requires_grad=True)
        y = glu(gate, torch.ones(7), activation)  # type: ignore[arg-type]
        (slope,) = torch.autograd.grad(y.sum(), gate)

        torch.testing.assert_close(y, gate.relu().detach(), rtol=0, atol=0)
        torch.testing.assert_close(slope, torch.tensor([0.0, 0, 0, 0.5, 1, 1, 1]), rtol=0, atol=1e-30)


@pytest.mark.slow
def test_opcheck() -> None:
    """Schema, fake kernel, autograd registration and tracing hold for both operators, strided inputs included."""
    gate, up = _halves(4, 6)
    torch.library.opcheck(_glu, (gate.t().requires_grad_(), up.t().requires_grad_(), "gelu"))
    torch.library.opcheck(_glu_packed, (gate.requires_grad_(), "silu"))
    torch.library.opcheck(_glu_packed, (torch.empty(0, 6), "gelu_tanh"))


@pytest.mark.slow
def test_one_graph() -> None:
    """Both kernels and their gradients compile without a graph break."""
    gate, up = _halves(4, 6)
    gate.requires_grad_()

    def plain(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return glu(gate, up, "gelu") + glu_packed(torch.cat((gate, up), -1))

    whole = torch.compile(plain, fullgraph=True, backend="aot_eager")(gate, up)

    torch.testing.assert_close(whole, plain(gate, up), rtol=0, atol=0)
    got, wanted = (torch.autograd.grad(y.sum(), gate) for y in (whole, plain(gate, up)))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_second_derivative_is_refused() -> None:
    """The backward kernels have no gradient of their own, and say so instead of leaving a term out."""
    gate, up = (t.requires_grad_() for t in _halves(2, 8))
    for y in (glu(gate, up), glu_packed(gate)):
        (first,) = torch.autograd.grad(y.square().sum(), gate, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            torch.autograd.grad(first.sum(), gate)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 4)])
def test_nothing_gives_nothing(shape: tuple[int, ...]) -> None:
    """Sizes of zero give empty results and gradients."""
    gate, up = (torch.empty(shape, requires_grad=True) for _ in range(2))
    packed = torch.empty((*shape[:-1], 2 * shape[-1]), requires_grad=True)

    for y, inputs in ((glu(gate, up), (gate, up)), (glu_packed(packed), (packed,))):
        assert y.shape == shape
        assert [d.shape for d in torch.autograd.grad(y.sum(), inputs)] == [t.shape for t in inputs]


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, "known: silu, gelu, gelu_tanh", lambda x: glu(x, x, "relu")),  # type: ignore[arg-type]
        (ValueError, "known: silu", lambda x: glu_packed(x, "tanh")),  # type: ignore[arg-type]
        (TypeError, "gate is float64, allowed: float32", lambda x: glu(x.double(), x)),
        (TypeError, "up is float16, allowed: float32", lambda x: glu(x, x.half())),
        (TypeError, "x is int64", lambda x: glu_packed(x.long())),
        (ValueError, "they must be equal", lambda x: glu(x, x[:1])),
        (ValueError, "must be even", lambda x: glu_packed(x[:, :3])),
        (ValueError, "no dimension", lambda x: glu_packed(x[0, 0])),
        (ValueError, "up is on meta", lambda x: glu(x, x.to("meta"))),
    ],
)
def test_what_is_refused(error: type[Exception], words: str, call: Callable[[torch.Tensor], object]) -> None:
    """What the kernels do not support is refused in words, before anything is launched."""
    with pytest.raises(error, match=words):
        call(torch.ones(2, 4))
