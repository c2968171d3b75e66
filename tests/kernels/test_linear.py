"""The linear kernels beyond their specs: second sources of the references, gradients, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from reference_kernels.linear import (
    gate_up_linear,
    gate_up_linear_reference,
    linear,
    linear_reference,
    lora_linear,
    lora_linear_reference,
    qkv_linear,
    qkv_linear_reference,
)
from reference_kernels.linear.gate_up import _gate_up_linear
from reference_kernels.linear.kernel import _linear
from reference_kernels.linear.lora import _lora_linear, _lora_linear_backward
from reference_kernels.linear.qkv import _qkv_linear
from reference_kernels.linear.thin import config_sums

SIZES = [(3, 5, 7), (40, 100, 70), (33, 600, 5)]  # rows, k, n: in one tile, in several, and many steps of k


def _normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def _close(got: object, wanted: object) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4, check_dtype=False)


@pytest.mark.parametrize(("rows", "k", "n"), SIZES)
def test_linear_is_torchs(rows: int, k: int, n: int) -> None:
    """The reference in float64 and the kernel in float32 are `torch.nn.functional.linear` and the activation."""
    x, weight, bias = _normal((rows, k), (n, k), (n,))
    for activation, function in ((None, lambda y: y), ("relu", F.relu), ("gelu", F.gelu), ("silu", F.silu)):
        wanted = function(F.linear(x, weight, bias))
        torch.testing.assert_close(linear_reference(x, weight, bias, activation, torch.float64), wanted)
        _close(linear(x.float(), weight.float(), bias.float(), activation), wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("rows", "k", "n"), SIZES)
def test_three_projections_are_three_layers(rows: int, k: int, n: int, biased: bool) -> None:
    """Queries, keys and values of three widths, one of them nothing, and of three layouts are those of three layers."""
    x, query, key, value, *biases = _normal((rows, k), (n, k), (k, 33), (0, k), (n,), (33,), (0,))
    weights = query, key.t(), value
    wanted = tuple(F.linear(x, w, b if biased else None) for w, b in zip(weights, biases, strict=True))
    given = biases if biased else [None] * 3

    torch.testing.assert_close(qkv_linear_reference(x, *weights, *given, torch.float64), wanted)  # type: ignore[arg-type]
    got = qkv_linear(x.float(), *(w.float() for w in weights), *(b if b is None else b.float() for b in given))

    _close(got, wanted)


@pytest.mark.parametrize(("rows", "k", "n"), SIZES)
def test_gate_and_up_are_two_layers(rows: int, k: int, n: int) -> None:
    """The reference in float64 and the kernel in float32 are silu of one layer times another, in two layouts."""
    x, gate, up = _normal((rows, k), (n, k), (k, n))
    wanted = F.silu(F.linear(x, gate)) * F.linear(x, up.t())

    torch.testing.assert_close(gate_up_linear_reference(x, gate, up.t(), torch.float64), wanted)
    _close(gate_up_linear(x.float(), gate.float(), up.float().t()), wanted)


@pytest.mark.parametrize("swapped", [True, False])
@pytest.mark.parametrize(("rows", "k", "n"), [(3, 8, 8), (40, 96, 72), (33, 480, 40)])
def test_gate_and_up_in_one_tensor(rows: int, k: int, n: int, swapped: bool) -> None:
    """Weights of whole 16 bytes a row are described as one tensor, in either order; the results and gradients are
    right, as they are of two that are apart."""
    x, whole, dy = _normal((rows, k), (2 * n, k), (rows, n), dtype=torch.float16)
    whole *= k**-0.5
    gate, up = whole.split(n)[::-1] if swapped else whole.split(n)
    apart, together = (
        [t.requires_grad_() for t in (x.detach().clone(), *weights)]
        for weights in ((gate.clone().t().contiguous().t(), up.clone()), (gate.detach(), up.detach()))
    )

    exact = [t.detach().double().requires_grad_() for t in (x, gate, up)]
    wanted = F.silu(F.linear(exact[0], exact[1])) * F.linear(exact[0], exact[2])
    wanted_gradients = torch.autograd.grad(wanted, exact, dy.double())
    for given in (together, apart):
        got = gate_up_linear(*given)
        torch.testing.assert_close(got.double(), wanted, rtol=2e-3, atol=1e-3)
        for mine, right in zip(torch.autograd.grad(got, given, dy), wanted_gradients, strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=2e-3, atol=4e-3)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("rows", "k", "n"), SIZES)
def test_gradients_of_three_projections(rows: int, k: int, n: int, biased: bool) -> None:
    """By the input, each weight and each bias they are those of three layers in float64, whatever the layouts are."""
    x, query, key, value, *biases = _normal((rows, k), (n, k), (k, 33), (0, k), (n,), (33,), (0,))
    dys = [_normal((width, rows))[0].t() for width in (n, 33, 0)]
    exact = [t.requires_grad_() for t in (x, query, key.t(), value, *(biases if biased else []))]
    given = exact[4:] or [None] * 3
    wanted = [F.linear(exact[0], w, b) for w, b in zip(exact[1:4], given, strict=True)]
    narrow = [t.detach().float().requires_grad_() for t in exact]

    got = qkv_linear(*narrow)

    gradients = torch.autograd.grad(wanted, exact, dys)
    found = torch.autograd.grad(got, narrow, [dy.float() for dy in dys])
    for d, right in zip(found, gradients, strict=True):
        torch.testing.assert_close(d.double(), right, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("rows", "k", "n"), SIZES)
def test_gradients_of_gate_and_up(rows: int, k: int, n: int) -> None:
    """By the input and both weights they are those of two layers in float64, whatever the layouts are."""
    x, gate, up, dy = _normal((rows, k), (n, k), (k, n), (n, rows))
    exact = [t.requires_grad_() for t in (x, gate, up.t())]
    narrow = [t.detach().float().requires_grad_() for t in exact]
    wanted = F.silu(F.linear(exact[0], exact[1])) * F.linear(exact[0], exact[2])

    found = torch.autograd.grad(gate_up_linear(*narrow), narrow, dy.t().float())

    for d, right in zip(found, torch.autograd.grad(wanted, exact, dy.t()), strict=True):
        torch.testing.assert_close(d.double(), right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))


def test_gradients_that_nobody_asked_for() -> None:
    """Frozen operands and an unused projection change no bit of the gradients that are asked for."""
    tensors = _normal((9, 40), (33, 40), (7, 40), (33,), (7,), dtype=torch.float32)

    def gradients(asked: list[int]) -> list[torch.Tensor]:
        x, query, key, wide, narrow = leaves = [t.clone().requires_grad_(i in asked) for i, t in enumerate(tensors)]
        q, k, _ = qkv_linear(x, query, key, key.detach(), wide, narrow, narrow.detach())
        loss = q.square().sum() + k.sum() + gate_up_linear(x, key, key.detach()).sum()
        return list(torch.autograd.grad(loss, [leaves[i] for i in asked]))

    whole = gradients([0, 1, 2, 3, 4])

    for number, d in enumerate(whole):
        assert torch.equal(gradients([number])[0], d)


def test_a_second_derivative_is_refused() -> None:
    """The backward kernels have no gradient of their own, and say so instead of leaving a term out."""
    x, weight = _normal((4, 6), (5, 6), dtype=torch.float32)
    x.requires_grad_()
    for y in (qkv_linear(x, weight, weight, weight)[1], gate_up_linear(x, weight, weight)):
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            torch.autograd.grad(first.sum(), x)


@pytest.mark.parametrize("rank", [0, 1, 5, 70, 128])
@pytest.mark.parametrize(("rows", "k", "n"), SIZES)
def test_low_rank_adaptation_is_another_weight(rows: int, k: int, n: int, rank: int) -> None:
    """In float64 the reference is the layer of ``weight + scale * up @ down``; result and all gradients of the kernel
    are those, too."""
    exact = [t.requires_grad_() for t in _normal((rows, k), (n, k), (rank, k), (n, rank))]
    x, weight, down, up = exact
    (dy,) = _normal((n, rows))
    wanted = F.linear(x, weight + 0.3 * up @ down)
    gradients = torch.autograd.grad(wanted, exact, dy.t())
    narrow = [t.detach().float().requires_grad_() for t in exact]

    reference = lora_linear_reference(*exact, 0.3, torch.float64)
    y = lora_linear(*narrow, 0.3)

    torch.testing.assert_close(reference, wanted)
    _close(y, wanted)
    for got, right in zip(torch.autograd.grad(y, narrow, dy.t().float()), gradients, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-3)


def test_only_the_factors_ask_for_gradients() -> None:
    """With a frozen weight and input, as in fine-tuning, the factors have the gradients that all four would get."""
    x, weight, down, up = _normal((9, 40), (33, 40), (4, 40), (33, 4), dtype=torch.float32)
    whole = [t.clone().requires_grad_() for t in (x, weight, down, up)]
    wanted = torch.autograd.grad(lora_linear(*whole).square().sum(), whole)
    factors = [down.requires_grad_(), up.requires_grad_()]

    got = torch.autograd.grad(lora_linear(x, weight, *factors).square().sum(), factors)

    assert all(torch.equal(a, b) for a, b in zip(got, wanted[2:], strict=True))


def test_infinities_stay_in_their_rows() -> None:
    """NaN and infinity make no NaN of zeros beyond the end of rows, columns, depth or rank."""
    x, weight, down, up = (t.abs() for t in _normal((4, 40), (33, 40), (3, 40), (33, 3), dtype=torch.float32))
    x[1, 2] = float("inf")
    for y in (
        lora_linear(x, weight, down, up),
        *qkv_linear(x, weight, down, weight),
        gate_up_linear(x, weight, weight),
    ):
        assert y[[0, 2, 3]].isfinite().all()
        assert torch.equal(y[1], torch.full_like(y[1], float("inf")))


@pytest.mark.slow
def test_opcheck() -> None:
    """Schema, fake kernels, autograd registration and tracing hold for all operators, strided inputs included."""
    x, weight, down, up, bias = _normal((6, 4), (5, 6), (6, 3), (5, 3), (5,), dtype=torch.float32)
    x, down = x.t(), down.t()
    torch.library.opcheck(_linear, (x, weight, bias, "gelu"))
    x, weight, down, up = (t.requires_grad_() for t in (x, weight, down, up))
    torch.library.opcheck(_qkv_linear, (x, weight, down, weight, None, None, None))
    torch.library.opcheck(_qkv_linear, (x, weight, weight, weight, bias, bias, bias.clone().requires_grad_()))
    torch.library.opcheck(_gate_up_linear, (x, weight, weight))
    torch.library.opcheck(_lora_linear, (x, weight, down, up, 0.5))
    leaves = [t.detach() for t in (x, weight, down, up)]
    torch.library.opcheck(_lora_linear_backward, (linear(leaves[0], leaves[1]), *leaves, 0.5, True, False, True))


@pytest.mark.slow
def test_one_graph() -> None:
    """All kernels and their gradients compile without a graph break."""
    x, weight, down, up = _normal((4, 6), (6, 6), (3, 6), (6, 3), dtype=torch.float32)
    leaves = [t.requires_grad_() for t in (x, weight, down, up)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        query, key, value = qkv_linear(linear(x, weight, None, "silu"), weight, weight, weight)
        return gate_up_linear(query + key * value, weight, weight)

    def plain(x: torch.Tensor, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        query, key, value = qkv_linear(lora_linear(x, weight.detach(), down, up), weight, weight, weight)
        return gate_up_linear(query + key * value, weight, weight).square()

    with torch.no_grad():
        whole = torch.compile(forward, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(whole, forward(x), rtol=0, atol=0)
    got, wanted = (
        torch.autograd.grad(f(*leaves).sum(), leaves)
        for f in (torch.compile(plain, fullgraph=True, backend="aot_eager"), plain)
    )
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 4)])
def test_sizes_of_zero(shape: tuple[int, ...]) -> None:
    """Nothing times anything is nothing, or zeros where nothing is summed; so are the gradients."""
    x, k = torch.empty(shape), shape[-1]
    weight, down, up = torch.ones(5, k), torch.ones(2, k), torch.ones(5, 2)
    leaves = [t.requires_grad_() for t in (x, weight, down, up)]
    zeros = torch.zeros(*shape[:-1], 5)

    for y in (*qkv_linear(x, weight, weight, weight), gate_up_linear(x, weight, weight), lora_linear(*leaves)):
        assert torch.equal(y, zeros)
    for leaf, d in zip(leaves, torch.autograd.grad(lora_linear(*leaves).sum(), leaves), strict=True):
        assert torch.equal(d, torch.zeros_like(leaf))
    query, key, value = qkv_linear(x, weight, weight, weight)
    for y in (query + key + value, gate_up_linear(x, weight, weight)):
        for leaf, d in zip(leaves, torch.autograd.grad(y.sum(), leaves[:2]), strict=False):
            assert torch.equal(d, torch.zeros_like(leaf))


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "linear: x is float64, allowed: float32", lambda x, w: linear(x.double(), w)),
        (ValueError, "known: None, relu, gelu, silu", lambda x, w: linear(x, w, None, "tanh")),  # type: ignore[arg-type]
        (ValueError, r"bias has shape \(4,\), weight needs \(3,\)", lambda x, w: linear(x, w, x[0])),
        (TypeError, "key_weight is float16, allowed: float32", lambda x, w: qkv_linear(x, w, w.half(), w)),
        (ValueError, r"value_weight \(4, 3\) do not fit", lambda x, w: qkv_linear(x, w, w, w.t())),
        (ValueError, "key_bias, value_bias is None", lambda x, w: qkv_linear(x, w, w, w, w[:, 0])),
        (ValueError, "key_bias has shape", lambda x, w: qkv_linear(x, w, w, w, w[:, 0], w[0], w[:, 0])),
        (ValueError, "up_weight is on meta", lambda x, w: gate_up_linear(x, w, w.to("meta"))),
        (ValueError, "they must be equal", lambda x, w: gate_up_linear(x, w, w[:2])),
        (ValueError, r"up has shape \(3, 4\), .* ask for \(3, 3\)", lambda x, w: lora_linear(x, w, w, w)),
        (
            ValueError,
            "the rank is 129, supported",
            lambda x, w: lora_linear(x, w, x[:1].expand(129, 4), w[:, :1].expand(3, 129)),
        ),
    ],
)
def test_what_is_refused(error: type[Exception], words: str, call: Callable[..., object]) -> None:
    """What the kernels do not support is refused in words, before anything is launched."""
    with pytest.raises(error, match=words):
        call(torch.ones(2, 4), torch.ones(3, 4))


@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (33, 2), (4097, 2), (65537, 32)])
def test_no_part_of_an_interpreted_sum_is_long(rows: int, parts: int) -> None:
    """Two where rows allow it, so that small cases add parts up; 1024 turns of two took 3 s."""
    assert config_sums(rows, 1, torch.float16, interpreted=True).splits == parts
