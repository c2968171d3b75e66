"""Launches of the suite's kernels that multiply matrices: linear layers, feed-forward, attention, codes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from reference_kernels import _sums
from reference_kernels.decode_attention import kernel as decode_attention
from reference_kernels.dequant_matmul import float8 as dequant_float8
from reference_kernels.dequant_matmul import kernel as dequant_matmul
from reference_kernels.flash_attention import backward as flash_attention_backward
from reference_kernels.flash_attention import kernel as flash_attention
from reference_kernels.glu import block as feed_forward
from reference_kernels.linear import backward as linear_backward
from reference_kernels.linear import descriptors, gate_up, gated, lora, qkv, thin
from reference_kernels.linear import kernel as linear

KERNELS = (
    linear._linear_kernel,
    qkv._qkv_kernel,
    qkv._qkv_tiles_kernel,
    gated._gated_kernel,
    linear_backward._summed_products_kernel,
    lora._lora_kernel,
    thin._thin_rows_kernel,
    thin._thin_sums_kernel,
    _sums._added_kernel,
    descriptors._linear_tiles_kernel,
    descriptors._gated_tiles_kernel,
    descriptors._summed_tiles_kernel,
    flash_attention._attention_kernel,
    flash_attention_backward._rows_kernel,
    flash_attention_backward._queries_kernel,
    flash_attention_backward._keys_kernel,
    decode_attention._decode_kernel,
    decode_attention._combine_kernel,
    dequant_matmul._dequant_kernel,
    dequant_matmul._deal_kernel,
    dequant_float8._float8_tiles_kernel,
)


def launches(empty: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Representative launches by name; ``empty`` makes a tensor of a shape, of dtype ``kind`` where one is given."""

    def thin_factors(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return empty(4096, 4096), empty(rank, 4096), empty(4096, rank)

    projections, wide = (
        (empty(4096, 4096), empty(1024, 4096), empty(1024, 4096)),
        (empty(14336, 4096), empty(14336, 4096)),
    )
    return {
        "linear few rows": lambda: linear._linear(empty(5, 4096), empty(4096, 4096), empty(4096), "relu"),
        "linear medium": lambda: linear._linear(empty(1024, 1024), empty(1024, 1024), empty(1024), "silu"),
        "linear large": lambda: linear._linear(empty(8192, 8192), empty(8192, 8192), empty(8192), "relu"),
        "linear large gelu": lambda: linear._linear(empty(8192, 8192), empty(8192, 8192), None, "gelu"),
        # Rows that are no multiple of 16 bytes have no descriptors.
        "linear large odd": lambda: linear._linear(empty(8192, 8191), empty(8192, 8191), None, "gelu"),
        "linear qkv odd": lambda: qkv._qkv_linear(empty(8192, 4095), *[empty(4096, 4095)] * 3, *[None] * 3),
        "linear gate_up odd": lambda: gate_up._gate_up_linear(empty(8192, 4095), *(empty(4096, 4095) for _ in "gu")),
        "linear lora odd": lambda: lora._lora_linear(
            empty(4096, 4095), empty(4096, 4095), empty(16, 4095), empty(4096, 16), 2.0
        ),
        "linear transposed": lambda: linear._linear(empty(70, 300).t(), empty(70, 33).t(), None, None),
        "linear qkv few rows": lambda: qkv._qkv_linear(empty(16, 4096), *projections, *[None] * 3),
        "linear qkv": lambda: qkv._qkv_linear(empty(8192, 4096), *projections, *[None] * 3),
        "linear qkv bias": lambda: qkv._qkv_linear(empty(1024, 4096), *projections, *(w[:, 0] for w in projections)),
        "linear gate_up few rows": lambda: gate_up._gate_up_linear(empty(16, 4096), *wide),
        "linear gate_up": lambda: gate_up._gate_up_linear(empty(8192, 4096), *wide),
        "linear gate_up medium": lambda: gate_up._gate_up_linear(empty(256, 4096), *(w[:1024] for w in wide)),
        **linear_gradients(empty),
        "linear lora few rows": lambda: lora._lora_linear(empty(16, 4096), *thin_factors(16), 2.0),
        "linear lora": lambda: lora._lora_linear(empty(4096, 4096), *thin_factors(16), 2.0),
        "linear lora 32": lambda: lora._lora_linear(empty(4096, 4096), *thin_factors(32), 2.0),
        "linear lora 64": lambda: lora._lora_linear(empty(4096, 4096), *thin_factors(64), 2.0),
        "linear lora 128": lambda: lora._lora_linear(empty(4096, 4096), *thin_factors(128), 2.0),
        "linear lora backward": lambda: lora._lora_linear_backward(
            empty(4096, 4096), empty(4096, 4096), *thin_factors(16), 2.0, True, True, True
        ),
        "linear lora backward 128": lambda: lora._lora_linear_backward(
            empty(4096, 4096), empty(4096, 4096), *thin_factors(128), 2.0, True, True, True
        ),
        **feed_forwards(empty),
        **attentions(empty),
        **dequantised(empty),
    }


def linear_gradients(empty: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Launches back through three projections and through a gate, of few rows, of some, and of a batch in training."""
    found: dict[str, Callable[[], Any]] = {}
    three, two = [empty(width, 4096) for width in (4096, 1024, 1024)], [empty(14336, 4096) for _ in range(2)]
    for name, rows in ((" few rows", 16), (" medium", 256), ("", 8192)):
        upstreams, x, dy = [empty(rows, len(weight)) for weight in three], empty(rows, 4096), empty(rows, 14336)
        found |= {
            f"linear qkv input{name}": functools.partial(linear_backward._summed_products, upstreams, three),
            f"linear qkv weight{name}": functools.partial(linear_backward.weight_gradient, upstreams[0], x),
            f"linear gate_up backward{name}": functools.partial(gate_up._gate_up_linear_backward, dy, x, *two),
            f"linear gate_up input{name}": functools.partial(linear_backward._summed_products, [dy, dy], two),
        }
    return found


def feed_forwards(empty: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Launches of a feed-forward block: up and down, with halves that are kept too, and back through the unit."""
    found: dict[str, Callable[[], Any]] = {}
    up, down = empty(14336, 4096), empty(4096, 14336)
    for name, rows, activation in ((" few rows", 16, "silu"), ("", 8192, "silu"), (" gelu", 8192, "gelu")):
        arguments, half = (empty(rows, 4096), up, empty(14336, 4096), down, activation), empty(rows, 14336)
        found |= {
            f"feed_forward{name}": functools.partial(feed_forward._feed_forward, *arguments, False),
            f"feed_forward kept{name}": functools.partial(feed_forward._feed_forward, *arguments, True),
            f"feed_forward backward{name}": functools.partial(
                feed_forward._feed_forward_backward, half, half, half, activation
            ),
        }
    return found


def attentions(empty: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Launches of attention, forward and backward in this order, and of decoding."""
    found: dict[str, Callable[[], Any]] = {}
    bind = functools.partial
    offsets = empty(9, kind=torch.int32)

    def flash(
        name: str, features: int, causal: bool, window: int | None, packed: bool = False, kv_heads: int = 2
    ) -> None:
        q, k = (empty(*(() if packed else (2,)), 512, heads, features) for heads in (8, kv_heads))
        lse, rest = empty(*q.shape[:-3], 8, 512, kind=torch.float32), empty(*q.shape, kind=torch.bfloat16)
        cuts = (offsets, None) if packed else (None, None)
        options = causal, window, 0.1
        found[f"attention{name}"] = bind(flash_attention._flash_attention, q, k, k, *cuts, *options, False, True)
        found[f"attention backward{name}"] = bind(
            flash_attention._flash_attention_backward, q, None, q, k, k, *cuts, q, lse, rest, *options, True, True
        )

    for features in (64, 96, 128, 256):
        flash(f" {features}", features, True, None)
    flash("", 128, False, None)
    flash(" window", 128, True, 100)
    flash(" ungrouped", 64, False, 7, kv_heads=8)
    flash(" packed", 128, True, None, packed=True)
    lengths, table, scales = empty(2, kind=torch.int32), empty(2, 512, kind=torch.int32), empty(8, kind=torch.float32)

    def decode(name: str, features: int, group: int, size: int, codes: torch.dtype | None = None) -> None:
        q, paged = empty(2, 8 * group, features), size > 0
        cache = empty(*((99, size) if paged else (2, 8192)), 8, features, **({"kind": codes} if codes else {}))
        scaled = (scales, scales) if codes else (None, None)
        found[f"decode{name}"] = bind(
            decode_attention._decode_attention,
            q,
            cache,
            cache,
            lengths,
            table if paged else None,
            None,
            0.1,
            *scaled,
            False,
        )

    for features in (64, 128, 256):
        decode(f" {features}", features, 8, 0)
    decode(" paged", 128, 8, 16)
    decode(" single", 128, 1, 0)
    if empty(0).dtype != torch.float32:  # which spills 168 bytes: nobody serves a model so
        decode(" float8", 128, 8, 16, torch.float8_e4m3fn)
    return found


def dequantised(empty: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Launches of products with codes: few rows in parts, which a second kernel adds, and many."""
    found: dict[str, Callable[[], Any]] = {}
    bind, float8 = functools.partial, torch.float8_e4m3fn
    if empty(0).dtype == torch.float32:  # which none of them takes
        return found
    one, every = empty(kind=torch.float32), empty(8192, kind=torch.float32)
    packed, scales = empty(8192, 2048, kind=torch.int16), empty(8192, 64)
    for name, rows in ("", 1), (" 16", 16), (" 64", 64), (" many", 512):
        x, codes = empty(rows, 8192), empty(8192, 8192, kind=torch.int8)
        narrow = empty(rows, 8192, kind=float8), empty(8192, 8192, kind=float8)
        found |= {
            f"dequant int8{name}": bind(dequant_matmul._int8_linear, x, codes, scales[:, 0]),
            f"dequant int4{name}": bind(dequant_matmul._int4_linear, x, packed, scales, 128),
            f"dequant float8{name}": bind(dequant_matmul._fp8_linear, *narrow, one, every, empty(0).dtype),
        }
    odd, group = empty(70, 33).t(), empty(50, 2)
    return found | {
        "dequant int8 odd": bind(dequant_matmul._int8_linear, odd, empty(50, 70, kind=torch.int8), group[:, 0]),
        "dequant int8 turned": bind(dequant_matmul._int8_linear, odd, empty(70, 50, kind=torch.int8).t(), group[:, 0]),
        "dequant int4 odd": bind(dequant_matmul._int4_linear, odd, empty(50, 32, kind=torch.int16), group, 64),
    }
