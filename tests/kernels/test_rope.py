"""The rope kernel beyond its specs: a second source of the reference, registration, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from reference_kernels.rope import rope, rope_reference
from reference_kernels.rope.kernel import _rope
from reference_kernels.rope.pairs import config

LAYOUTS = ("half", "interleaved")


def _inputs(
    batch: tuple[int, ...] = (3,), q_heads: int = 4, k_heads: int = 2, half: int = 5, rest: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(*batch, heads, 2 * half + rest, generator=generator) for heads in (q_heads, k_heads))
    angle = 10 * torch.rand(*batch, half, generator=generator)
    return [q, k, angle.cos(), angle.sin()]


def _by_complex_numbers(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> torch.Tensor:
    """Each pair as a complex number, times ``cos + i * sin``."""
    half = cos.shape[-1]
    pairs = x[..., : 2 * half]
    lead = x.shape[:-1]
    pairs = pairs.reshape(*lead, 2, half).transpose(-1, -2) if layout == "half" else pairs.reshape(*lead, half, 2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin).unsqueeze(-2))
    turned = turned.transpose(-1, -2) if layout == "half" else turned
    return torch.cat((turned.flatten(-2), x[..., 2 * half :]), -1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rest", [0, 3])
def test_the_reference_multiplies_complex_numbers(layout: str, rest: int) -> None:
    """In float64 the reference is the product with ``exp(i * angle)``, pair by pair."""
    q, k, cos, sin = (t.double() for t in _inputs((2, 3), rest=rest))

    got = rope_reference(q, k, cos, sin, layout, torch.float64)

    wanted = [_by_complex_numbers(x, cos, sin, layout) for x in (q, k)]
    torch.testing.assert_close(got, tuple(wanted), rtol=1e-14, atol=1e-15)


def test_the_reference_is_rotate_half() -> None:
    """Layout "half" is what Llama's ``x * cos + rotate_half(x) * sin`` computes from tables that repeat each angle."""
    q, k, cos, sin = (t.double() for t in _inputs())
    wide_cos, wide_sin = (torch.cat((t, t), -1).unsqueeze(-2) for t in (cos, sin))
    first, second = q.chunk(2, -1)

    got, _ = rope_reference(q, k, cos, sin, "half", torch.float64)

    torch.testing.assert_close(got, q * wide_cos + torch.cat((-second, first), -1) * wide_sin, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_turns_back(layout: str) -> None:
    """Backward of an orthogonal turn returns what was turned, for queries and keys, and the rest untouched."""
    q, k, cos, sin = _inputs((2, 3), rest=4)
    q.requires_grad_()
    k.requires_grad_()

    turned = rope(q, k, cos, sin, layout)  # type: ignore[arg-type]
    back = torch.autograd.grad(turned, (q, k), [t.detach() for t in turned])

    torch.testing.assert_close(back, (q.detach(), k.detach()), rtol=1e-5, atol=1e-6)
    assert torch.equal(back[0][..., 10:], q[..., 10:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_any_order(layout: str) -> None:
    """First and second derivatives are those of the reference, of a function that is not linear in the result."""
    found = []
    for function in (rope, rope_reference):
        q, k, cos, sin = _inputs(rest=1)
        q.requires_grad_()
        k.requires_grad_()
        out = function(q, k, cos, sin, layout)  # type: ignore[arg-type]
        first = torch.autograd.grad(out[0].sin().sum() + out[1].cos().sum(), (q, k), create_graph=True)
        found.append((*first, *torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), (q, k))))

    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_past_one_block(layout: str) -> None:
    """Heads that take several programs, and far more keys than queries, are all turned."""
    for q_heads, k_heads in ((70, 3), (1, 50)):
        q, k, cos, sin = _inputs(q_heads=q_heads, k_heads=k_heads, half=16)
        assert config(q_heads, k_heads, 16, 0, interpreted=True).blocks > 1

        got = rope(q, k, cos, sin, layout)  # type: ignore[arg-type]

        torch.testing.assert_close(got, rope_reference(q, k, cos, sin, layout), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_opcheck() -> None:
    """Schema, fake kernel, autograd registration and tracing hold, for shared tables and heads before tokens too."""
    q, k, cos, sin = _inputs((2, 3))
    q, k = (t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k))
    for interleaved in (False, True):
        torch.library.opcheck(_rope, (q, k, cos[0], sin[0], interleaved, False))


@pytest.mark.slow
def test_one_graph() -> None:
    """The kernel and its gradient compile without a graph break."""
    q, k, cos, sin = _inputs()
    q.requires_grad_()

    whole = torch.compile(rope, fullgraph=True, backend="aot_eager")(q, k, cos, sin)

    plain = rope(q, k, cos, sin)
    torch.testing.assert_close(whole, plain, rtol=0, atol=0)
    got, wanted = (torch.autograd.grad(y[0].square().sum() + y[1].sum(), q) for y in (whole, plain))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    "sizes", [{"batch": (0,)}, {"q_heads": 0}, {"k_heads": 0}, {"half": 0}, {"half": 0, "rest": 6}]
)
def test_sizes_of_zero(sizes: dict[str, int]) -> None:
    """No tokens, no heads on one side, no pairs: what is left is turned or copied, and has its gradient."""
    q, k, cos, sin = _inputs(**sizes)  # type: ignore[arg-type]
    q.requires_grad_()
    k.requires_grad_()

    got = rope(q, k, cos, sin)
    gradients = torch.autograd.grad(got[0].sum() + got[1].sum(), (q, k))

    torch.testing.assert_close(got, rope_reference(q, k, cos, sin), rtol=1e-6, atol=1e-6)
    assert [t.shape for t in gradients] == [q.shape, k.shape]


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, "known: half, interleaved", lambda q, k, c, s: rope(q, k, c, s, "neox")),  # type: ignore[arg-type]
        (TypeError, "k is float16, allowed: float32", lambda q, k, c, s: rope(q, k.half(), c, s)),
        (TypeError, "cos is int64", lambda q, k, c, s: rope(q, k, c.long(), s)),
        (ValueError, "heads come before the tokens", lambda q, k, c, s: rope(q.mT, k, c, s)),
        (ValueError, "does not broadcast", lambda q, k, c, s: rope(q, k, c[:2], s)),
        (ValueError, r"pass cos\[", lambda q, k, c, s: rope(q, k, torch.cat((c, c), -1), torch.cat((s, s), -1))),
        (ValueError, "cos has 5 angles, sin 4", lambda q, k, c, s: rope(q, k, c, s[:, :4])),
        (ValueError, "requires a gradient", lambda q, k, c, s: rope(q, k, c.requires_grad_(), s)),
        (ValueError, "sin is on meta", lambda q, k, c, s: rope(q, k, c, s.to("meta"))),
        (ValueError, "supported: up to 1024", lambda q, k, c, s: rope(*(torch.ones(3, 1, 1026),) * 2, c, s)),
    ],
)
def test_what_is_refused(error: type[Exception], words: str, call: Callable[..., object]) -> None:
    """What the kernel does not support is refused in words, before anything is launched."""
    with pytest.raises(error, match=words):
        call(*_inputs())
