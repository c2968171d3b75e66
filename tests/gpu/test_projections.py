"""Linear layers with gradients, the feed-forward block and rope with its cache, at the sizes of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu

UNITS = {torch.float32: 2e-5, torch.bfloat16: 2**-7}  # of the largest element: sums of some thousand products


def _qkv(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return torch.cat([F.linear(x, weight) for weight in weights], -1)


def _gate_up(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def _block(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(_gate_up(x, gate, up), down)


def _fused(name: str) -> Callable[..., torch.Tensor]:
    from reference_kernels.glu import feed_forward
    from reference_kernels.linear import gate_up_linear, qkv_linear

    def qkv(*operands: torch.Tensor) -> torch.Tensor:
        return torch.cat(qkv_linear(*operands), -1)

    return {"qkv": qkv, "gate_up": gate_up_linear, "feed_forward": feed_forward}[name]


LAYERS: dict[str, tuple[Any, tuple[tuple[int, int], ...]]] = {
    "qkv": (_qkv, ((1024, 1024), (256, 1024), (256, 1024))),
    "gate_up": (_gate_up, ((3584, 1024), (3584, 1024))),
    "feed_forward": (_block, ((3584, 1024), (3584, 1024), (1000, 3584))),
}


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("rows", [5, 300, 8192])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_their_gradients(name: str, rows: int, dtype: torch.dtype) -> None:
    """Results and gradients are those of the layers in float64, through every tile, and the same bits every time."""
    plain, shapes = LAYERS[name]
    generator = torch.Generator("cuda").manual_seed(3)
    sizes = (rows, 1024), *shapes
    x, *weights = (torch.randn(size, device="cuda", generator=generator) for size in sizes)
    operands = [t.to(dtype).requires_grad_() for t in (x, *(w * w.shape[1] ** -0.5 for w in weights))]
    exact = [t.detach().double().requires_grad_() for t in operands]
    wanted = plain(*exact)
    dy = torch.randn(wanted.shape, device="cuda", generator=generator).to(dtype)

    y = _fused(name)(*operands)
    found = torch.autograd.grad(y, operands, dy, retain_graph=True)

    right = wanted, *torch.autograd.grad(wanted, exact, dy.double())
    for got, expected in zip((y, *found), right, strict=True):
        off = (got.double() - expected).abs().max() / expected.abs().max()
        assert off.item() < UNITS[dtype]
    again = torch.autograd.grad(y, operands, dy)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def _lora(x: torch.Tensor, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight) + 0.5 * F.linear(F.linear(x, down), up)


@pytest.mark.parametrize("depth", [1024, 1023])
@pytest.mark.parametrize("name", ["linear", "gate_up", "lora"])
def test_large_results_with_descriptors_and_without(name: str, depth: int) -> None:
    """Rows of whole 16 bytes are read by descriptors, odd ones by pointers: both ways results and gradients are those
    of the layers in float64."""
    from reference_kernels.linear import gate_up_linear, linear, lora_linear

    made: dict[str, tuple[Any, Any, tuple[tuple[int, int], ...]]] = {
        "linear": (F.linear, linear, ((3592, depth),)),
        "gate_up": (_gate_up, gate_up_linear, ((3592, depth), (3592, depth))),
        "lora": (_lora, lambda *given: lora_linear(*given, 0.5), ((3592, depth), (24, depth), (3592, 24))),
    }
    plain, fused, shapes = made[name]
    generator = torch.Generator("cuda").manual_seed(4)
    sizes = (4001, depth), *shapes
    asked = name != "linear"  # which has no gradients
    scaled = [torch.randn(size, device="cuda", generator=generator) * size[1] ** -0.5 for size in sizes]
    operands = [t.bfloat16().requires_grad_(asked) for t in scaled]
    exact = [t.detach().double().requires_grad_(asked) for t in operands]
    wanted, got = plain(*exact), fused(*operands)
    pairs = [(got, wanted)]
    if asked:
        dy = torch.randn(wanted.shape, device="cuda", generator=generator).bfloat16()
        right = torch.autograd.grad(wanted, exact, dy.double())
        pairs += zip(torch.autograd.grad(got, operands, dy), right, strict=True)

    for found, expected in pairs:
        off = (found.double() - expected).abs().max() / expected.abs().max()
        assert off.item() < UNITS[torch.bfloat16]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_fills_a_cache_in_a_graph(layout: Any, kind: torch.dtype) -> None:
    """A captured write, replayed with other tokens of which the last are padding, fills the slots that it is given."""
    from reference_kernels.rope import rope_cache, rope_cache_reference

    if kind.itemsize == 1 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 begins with capability 8.9")
    tokens, pages = 1000, 100
    generator = torch.Generator("cuda").manual_seed(3)

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    q, k, v = fresh(tokens, 32, 128), fresh(tokens, 8, 128), fresh(tokens, 8, 128)
    angle = torch.rand(tokens, 64, device="cuda", generator=generator)
    cos, sin, slots = angle.cos(), angle.sin(), torch.full((tokens,), -1, dtype=torch.int32, device="cuda")
    caches = [fresh(pages, 16, 8, 128).to(kind) for _ in range(2)]
    wanted = [cache.clone() for cache in caches]
    rope_cache(q, k, v, cos, sin, *caches, slots, layout, checked=False)  # compiled before it is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rope_cache(q, k, v, cos, sin, *caches, slots, layout, checked=False)
    for t in (q, k, v):
        t.copy_(fresh(*t.shape))
    slots[:900] = torch.randperm(pages * 16, device="cuda", generator=generator)[:900].int()
    graph.replay()
    torch.cuda.synchronize()

    expected = rope_cache_reference(q, k, v, cos, sin, *wanted, slots, layout)

    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-4)
    for got, right in zip(caches, wanted, strict=True):
        steps = 2**-7 if kind.itemsize == 2 else 2**-3  # of the last digit
        torch.testing.assert_close(got.float(), right.float(), rtol=steps, atol=2**-9)


def test_rope_waits_for_slots_that_are_checked() -> None:
    """Checked slots out of range, or of two tokens, are refused; unchecked ones leave the device as it was."""
    from reference_kernels.rope import rope_cache

    q, angle = torch.ones(3, 2, 8, device="cuda"), torch.zeros(3, 4, device="cuda")
    caches = [torch.zeros(2, 4, 2, 8, device="cuda") for _ in range(2)]
    for wrong, words in (([0, 8, 1], "token 1 is 8"), ([5, -1, 5], "tokens 0 and 2 have the same slot, 5")):
        slots = torch.tensor(wrong, device="cuda")
        with pytest.raises(ValueError, match=words):
            rope_cache(q, q, q, angle.cos(), angle.sin(), *caches, slots)
    assert not any(cache.any() for cache in caches)

    slots = torch.tensor([2**40, -7, 6], device="cuda")
    rope_cache(q, q, q, angle.cos(), angle.sin(), *caches, slots, checked=False)

    assert [cache.flatten(0, 1).flatten(1).any(1).nonzero().tolist() for cache in caches] == [[[6]]] * 2
