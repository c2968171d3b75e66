"""Compiles the launches of the suite's kernels for sm_90 on a machine without a GPU, and tells what they take.

Run as a program, with one dtype as its argument, in a process without TRITON_INTERPRET: which of the two a kernel is
gets decided when it is decorated. The launchers themselves are called; only Triton's last step is replaced by one that
notes the arguments, so that what is compiled is what would have been launched.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from reference_kernels import _norm_gradients, _sums
from reference_kernels.adamw import kernel as adamw
from reference_kernels.batch_norm import backward as batch_norm_backward
from reference_kernels.batch_norm import kernel as batch_norm
from reference_kernels.cross_entropy import kernel as cross_entropy
from reference_kernels.decode_attention import kernel as decode_attention
from reference_kernels.dequant_matmul import float8 as dequant_float8
from reference_kernels.dequant_matmul import kernel as dequant_matmul
from reference_kernels.embedding import interaction
from reference_kernels.embedding import kernel as embedding
from reference_kernels.flash_attention import backward as flash_attention_backward
from reference_kernels.flash_attention import kernel as flash_attention
from reference_kernels.glu import block as feed_forward
from reference_kernels.glu import kernel as glu
from reference_kernels.layer_norm import kernel as layer_norm
from reference_kernels.linear import described, gate_up, gated, gradients, lora, qkv, thin
from reference_kernels.linear import kernel as linear
from reference_kernels.linear_cross_entropy import kernel as linear_cross_entropy
from reference_kernels.moe_gate import kernel as moe_gate
from reference_kernels.norm_quant import kernel as norm_quant
from reference_kernels.pointwise import kernel as pointwise
from reference_kernels.pointwise import seeded_dropout
from reference_kernels.rms_norm import kernel as rms_norm
from reference_kernels.rope import cache as rope_cache
from reference_kernels.rope import kernel as rope
from reference_kernels.sampling import kernel as sampling
from reference_kernels.softmax import backward as softmax_backward
from reference_kernels.softmax import kernel as softmax

KERNELS = (
    softmax._softmax_kernel,
    softmax_backward._input_kernel,
    softmax_backward._bias_kernel,
    rms_norm._rms_norm_kernel,
    linear._linear_kernel,
    qkv._qkv_kernel,
    qkv._qkv_tiles_kernel,
    gated._gated_kernel,
    gradients._summed_products_kernel,
    lora._lora_kernel,
    thin._thin_rows_kernel,
    thin._thin_sums_kernel,
    _sums._added_kernel,
    described._linear_tiles_kernel,
    described._gated_tiles_kernel,
    described._summed_tiles_kernel,
    glu._glu_kernel,
    glu._glu_backward_kernel,
    rope._rope_kernel,
    rope_cache._rope_cache_kernel,
    layer_norm._layer_norm_kernel,
    _norm_gradients._rows_backward_kernel,
    _norm_gradients._tilts_kernel,
    _norm_gradients._columns_kernel,
    _sums._parts_kernel,
    cross_entropy._losses_kernel,
    cross_entropy._total_kernel,
    cross_entropy._gradient_kernel,
    linear_cross_entropy._loss_gradient_kernel,
    linear_cross_entropy._scale_kernel,
    pointwise._relu_scale_bias_kernel,
    pointwise._relu_scale_bias_backward_kernel,
    pointwise._add_mul_act_kernel,
    pointwise._add_mul_act_backward_kernel,
    seeded_dropout._dropout_kernel,
    norm_quant._norm_quant_kernel,
    sampling._sample_kernel,
    moe_gate._moe_gate_kernel,
    moe_gate._moe_gate_backward_kernel,
    flash_attention._attention_kernel,
    flash_attention_backward._rows_kernel,
    flash_attention_backward._queries_kernel,
    flash_attention_backward._keys_kernel,
    decode_attention._decode_kernel,
    decode_attention._combine_kernel,
    dequant_matmul._dequant_kernel,
    dequant_matmul._deal_kernel,
    dequant_float8._float8_tiles_kernel,
    embedding._bags_kernel,
    embedding._rows_kernel,
    embedding._scales_kernel,
    interaction._interaction_kernel,
    interaction._interaction_backward_kernel,
    adamw._adamw_kernel,
    batch_norm._moments_kernel,
    batch_norm._combine_kernel,
    batch_norm._batch_norm_kernel,
    batch_norm_backward._sums_kernel,
    batch_norm_backward._input_kernel,
)
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
}


def launches(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Representative launches by name; the memory is never touched, so sizes cost nothing."""

    def empty(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind)

    def quantised(width: int, codes: str, group: int | None, residual: bool = False, layer: bool = False) -> Any:
        x, vector = empty(64, width), empty(width)
        bias = vector if layer else None
        return norm_quant._norm_quant(x, x if residual else None, vector, bias, 1e-6, layer, codes, group)

    halves = empty(64, 14336), empty(64, 14336)
    heads, angles = (empty(2, 64, 32, 128), empty(2, 64, 8, 128)), [empty(64, 64, kind=torch.float32)] * 2
    partial = empty(2, 64, 32, 96), empty(2, 64, 32, 96)
    losses, statistics, labels = (
        empty(64, kind=torch.float32),
        empty(2, 64, kind=torch.float32),
        empty(64, kind=torch.int64),
    )
    plain, every = (-100, 0.0, 0.0, 0.0), (-100, 0.1, 0.1, 30.0)
    known = labels, statistics, losses[0]

    def thin_factors(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return empty(4096, 4096), empty(rank, 4096), empty(4096, rank)

    projections, wide = (
        (empty(4096, 4096), empty(1024, 4096), empty(1024, 4096)),
        (empty(14336, 4096), empty(14336, 4096)),
    )
    three = [empty(64, 8192)] * 3
    columns = empty(8192), empty(8192)
    vocabulary, number = empty(64, 128256), empty(64, kind=torch.float32)
    seen, whole = empty(64, 128256, kind=torch.bool), empty(64, kind=torch.int64)
    gates, chosen, slots = empty(32768, 256), empty(32768, 8), empty(32768, 8, kind=torch.int64)
    return {
        **softmaxes(empty),
        **rms_norms(empty),
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
        "glu silu": lambda: glu._glu(*halves, "silu"),
        "glu gelu": lambda: glu._glu(*halves, "gelu"),
        "glu gelu_tanh": lambda: glu._glu(*halves, "gelu_tanh"),
        "glu packed": lambda: glu._glu_packed(empty(64, 28672), "silu"),
        "glu packed narrow": lambda: glu._glu_packed(empty(64, 66), "silu"),
        "glu backward silu": lambda: glu._glu_backward(halves[0], *halves, "silu"),
        "glu backward gelu": lambda: glu._glu_backward(halves[0], *halves, "gelu"),
        "glu backward gelu_tanh": lambda: glu._glu_backward(halves[0], *halves, "gelu_tanh"),
        "glu backward packed": lambda: glu._glu_packed_backward(halves[0], empty(64, 28672), "silu"),
        **feed_forwards(empty),
        "rope half": lambda: rope._rope(*heads, *angles, False, False),
        "rope interleaved": lambda: rope._rope(*heads, *angles, True, True),
        **rope_caches(empty),
        "rope partial": lambda: rope._rope(*partial, *(angle[:, :16] for angle in angles), False, False),
        **layer_norms(empty),
        **attentions(empty),
        **dequantised(empty),
        **embeddings(empty),
        **batch_norms(empty),
        **few_rows(empty),
        "adamw": lambda: steps(empty, masters=False),
        "adamw masters": lambda: steps(empty, masters=True),
        "cross_entropy": lambda: cross_entropy._losses(empty(64, 128256), labels, *plain),
        "cross_entropy odd": lambda: cross_entropy._losses(empty(64, 50257), labels, *every),
        "cross_entropy narrow": lambda: cross_entropy._losses(empty(64, 1000), labels, *every),
        "cross_entropy single": lambda: cross_entropy._losses(empty(1, 1), labels[:1], *every),
        "cross_entropy total": lambda: cross_entropy._total(losses, statistics, True),
        "cross_entropy backward": lambda: cross_entropy._cross_entropy_backward(
            losses[0], empty(64, 128256), *known, *plain, "mean"
        ),
        "cross_entropy backward odd": lambda: cross_entropy._cross_entropy_backward(
            losses, empty(64, 50257), *known, *every, "none"
        ),
        "cross_entropy backward single": lambda: cross_entropy._cross_entropy_backward(
            losses[0], empty(1, 1), labels[:1], statistics[:, :1], losses[0], *every, "mean"
        ),
        "cross_entropy total single": lambda: cross_entropy._total(losses[:1], statistics[:, :1], True),
        "linear_cross_entropy": lambda: linear_cross_entropy._loss_gradient(
            losses, statistics, empty(64, 128256), labels, losses[0], *plain, True
        ),
        "linear_cross_entropy odd": lambda: linear_cross_entropy._loss_gradient(
            losses, statistics, empty(64, 50257), labels, losses[0], *every, False
        ),
        "linear_cross_entropy scale": lambda: linear_cross_entropy._scale(empty(4096, 4096), losses[0]),
        "linear_cross_entropy scale single": lambda: linear_cross_entropy._scale(empty(1), losses[0]),
        "linear_cross_entropy classes": lambda: cross_entropy.write_gradient(
            empty(64, 16384), losses, empty(64, 16384), *known, *every, False, 16384, 128256
        ),
        "rope widest": lambda: rope._rope(empty(9, 7, 1024), empty(9, 1, 1024), *[empty(9, 512)] * 2, True, False),
        "relu_scale_bias": lambda: pointwise._relu_scale_bias(empty(64, 8192), *columns),
        "relu_scale_bias narrow": lambda: pointwise._relu_scale_bias(empty(64, 33), empty(33), empty(33)),
        "relu_scale_bias backward": lambda: pointwise._relu_scale_bias_backward(*three[:2], *columns),
        "add_mul relu": lambda: pointwise._add_mul_act(*three, "relu"),
        "add_mul gelu": lambda: pointwise._add_mul_act(*three, "gelu"),
        "add_mul backward relu": lambda: pointwise._add_mul_act_backward(three[0], *three, "relu"),
        "add_mul backward gelu": lambda: pointwise._add_mul_act_backward(three[0], *three, "gelu"),
        "add_mul backward silu": lambda: pointwise._add_mul_act_backward(three[0], *three, "silu"),
        "dropout": lambda: seeded_dropout._dropout(three[0], 5, 0.1),
        "dropout strided": lambda: seeded_dropout._dropout(empty(300, 70).t(), 2**40 + 1, 0.1),
        "norm_quant fp8": lambda: quantised(8192, "fp8", None),
        "norm_quant fp8 groups": lambda: quantised(8192, "fp8", 128),
        "norm_quant int8": lambda: quantised(8192, "int8", None),
        "norm_quant int8 groups": lambda: quantised(8192, "int8", 128, layer=True),
        "norm_quant residual": lambda: quantised(8192, "fp8", None, residual=True),
        "norm_quant residual groups": lambda: quantised(8192, "fp8", 128, residual=True, layer=True),
        "norm_quant narrow": lambda: quantised(33, "int8", 16, residual=True),
        "norm_quant widest tile": lambda: quantised(16384, "fp8", 128, residual=True, layer=True),
        "norm_quant loop": lambda: quantised(50000, "fp8", None, residual=True),
        "norm_quant loop groups": lambda: quantised(50000, "int8", 1024, layer=True),
        "sample": lambda: sampling._sample(vocabulary, 5, None, [None] * 4, [0.7, 0, 1.0, 1.0]),
        "sample cut": lambda: sampling._sample(vocabulary, 5, seen, [None] * 4, [0.7, 50, 0.9, 1.2]),
        "sample by row": lambda: sampling._sample(vocabulary, 5, None, [number, whole, number, number], [0.0] * 4),
        "sample narrow": lambda: sampling._sample(vocabulary[:, :100], 5, None, [None] * 4, [0.7, 5, 0.9, 1.0]),
        "moe_gate": lambda: moe_gate._moe_gate(gates, 8, True),
        "moe_gate all": lambda: moe_gate._moe_gate(gates, 8, False),
        "moe_gate widest": lambda: moe_gate._moe_gate(empty(64, 4096), 64, True),
        "moe_gate backward": lambda: moe_gate._moe_gate_backward(chosen, slots, gates, True),
        "moe_gate backward all": lambda: moe_gate._moe_gate_backward(chosen, slots, gates, False),
    }


def softmaxes(empty: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Launches of softmax: rows in registers and in a loop, forward and backward, plain, masked and with dropout."""
    found: dict[str, Callable[[], Any]] = {}
    bind, plain, causal, full = functools.partial, (None, 0, 0.0), (0, 0, 0.0), (0, 5, 0.1)
    sizes = (" short", 64, 100), ("", 64, 8192), (" widest tile", 64, 16384), (" loop", 64, 50000), (" single", 1, 1)
    for name, rows, width in sizes:
        x, keep = empty(rows, width), empty(rows, width, kind=torch.bool)
        gradient = bind(softmax._softmax_backward, x, x)
        found |= {
            f"softmax{name}": bind(softmax._softmax, x, 1.0, None, None, *plain),
            f"softmax masked{name}": bind(softmax._softmax, x, 1.0, keep, x[0], *plain),
            f"softmax causal{name}": bind(softmax._softmax, x, 1.0, None, None, *causal),
            f"softmax dropout{name}": bind(softmax._softmax, x, 1.0, keep, x[0], *full),
            f"softmax backward{name}": bind(gradient, None, None, 1.0, *plain, False),
            f"softmax backward causal{name}": bind(gradient, None, None, 1.0, *causal, False),
            f"softmax backward dropout{name}": bind(gradient, keep, x[0], 1.0, *full, False),
            f"softmax backward bias{name}": bind(gradient, keep, x[0], 1.0, *plain, True),
        }
    heads, bias = empty(2, 8, 64, 2048), empty(1, 8, 64, 2048)
    unfoldable = empty(3, 4, 5, 30).transpose(0, 2)
    return found | {
        "softmax unfoldable": bind(softmax._softmax, unfoldable, 1.0, None, None, *plain),
        "softmax backward heads": bind(softmax._softmax_backward, heads, heads, None, bias, 1.0, *full, True),
    }


def rms_norms(empty: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Launches of rms_norm in each convention, with a residual, and of its backward."""
    found: dict[str, Callable[[], Any]] = {}
    bind = functools.partial
    sizes = ("", 64, 8192), (" narrow", 64, 1000), (" widest tile", 64, 16384), (" loop", 64, 50000), (" single", 1, 1)
    for name, rows, width in sizes:
        x, weight, scales = empty(rows, width), empty(width), empty(1, rows, kind=torch.float32)
        backward = bind(rms_norm._rms_norm_backward, x, None, x, weight, scales)
        found |= {
            f"rms_norm {convention}{name}": bind(rms_norm._rms_norm, x, weight, 1e-6, convention)
            for convention in ("llama", "gemma", "torch")
        } | {
            f"rms_norm add{name}": bind(rms_norm._forward, x, x, weight, 1e-6, "torch"),
            f"rms_norm backward{name}": bind(backward, "llama", True),
            f"rms_norm input{name}": bind(backward, "gemma", False),
            f"rms_norm add backward{name}": bind(rms_norm._rms_norm_backward, x, x, x, weight, scales, "gemma", True),
        }
    return found


def linear_gradients(empty: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Launches back through three projections and through a gate, of few rows, of some, and of a batch in training."""
    found: dict[str, Callable[[], Any]] = {}
    three, two = [empty(width, 4096) for width in (4096, 1024, 1024)], [empty(14336, 4096) for _ in range(2)]
    for name, rows in ((" few rows", 16), (" medium", 256), ("", 8192)):
        upstreams, x, dy = [empty(rows, len(weight)) for weight in three], empty(rows, 4096), empty(rows, 14336)
        found |= {
            f"linear qkv input{name}": functools.partial(gradients._summed_products, upstreams, three),
            f"linear qkv weight{name}": functools.partial(gradients.weight_gradient, upstreams[0], x),
            f"linear gate_up backward{name}": functools.partial(gate_up._gate_up_linear_backward, dy, x, *two),
            f"linear gate_up input{name}": functools.partial(gradients._summed_products, [dy, dy], two),
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


def rope_caches(empty: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Launches of rope with the write into pages of 16, in the input's dtype and in float8 with scales."""
    found: dict[str, Callable[[], Any]] = {}
    number, eight, plain = torch.float32, torch.float8_e4m3fn, empty(0).dtype
    scales, slots = empty(8, kind=number), empty(64, kind=torch.int64)

    def write(name: str, dim: int, half: int, interleaved: bool, kind: torch.dtype = plain) -> None:
        q, k, angle = empty(64, 32, dim), empty(64, 8, dim), empty(64, half, kind=number)
        cache, scaled = empty(99, 16, 8, dim, kind=kind), (scales, scales) if kind == eight else (None, None)
        arguments = q, k, k, angle, angle, cache, empty(99, 16, 8, dim, kind=kind), slots, *scaled, interleaved, False
        found[f"rope cache{name}"] = functools.partial(rope_cache._rope_cache, *arguments)

    write("", 128, 64, False)
    write(" interleaved", 128, 64, True)
    write(" partial", 96, 16, False)
    write(" float8", 128, 64, False, eight)
    write(" float8 partial", 96, 16, True, eight)
    write(" widest", 1024, 512, False)
    return found


def layer_norms(empty: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Launches of layer_norm: rows in registers and in a loop, forward, and backward with and without sums."""
    found: dict[str, Callable[[], Any]] = {}
    bind, backward = functools.partial, _norm_gradients
    sizes = ("", 64, 8192), (" narrow", 64, 1000), (" widest tile", 64, 16384), (" loop", 64, 50000), (" single", 1, 1)
    for name, rows, width in sizes:
        x, weight, moments = empty(rows, width), empty(width), empty(3, rows, kind=torch.float32)
        gradient = bind(backward.input_gradient, x, x, x, None, weight, moments)
        found |= {
            f"layer_norm{name}": bind(layer_norm._forward, x, None, weight, weight, 1e-5),
            f"layer_norm add{name}": bind(layer_norm._forward, x, x, weight, None, 1e-5),
            f"layer_norm backward{name}": bind(gradient, (True, True)),
            f"layer_norm input{name}": bind(gradient, (False, False)),
        }
    parts, weight = empty(2, 264, 8192, kind=torch.float32), empty(8192)
    return found | {"layer_norm parts": bind(_sums.summed_parts, weight, weight, parts, (True, True))}


def attentions(empty: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Launches of attention, forward and backward in this order, and of decoding."""
    found: dict[str, Callable[[], Any]] = {}
    bind = functools.partial
    offsets = empty(9, kind=torch.int32)

    def flash(name: str, features: int, causal: bool, window: int | None, packed: bool = False) -> None:
        q, k = (empty(*(() if packed else (2,)), 512, heads, features) for heads in (8, 2))
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


def embeddings(empty: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Launches of bags, plain and weighted, with both gradients in this order, and of the interaction."""
    found: dict[str, Callable[[], Any]] = {}
    bind, kind = functools.partial, torch.int64
    starts, offsets = torch.arange(0, 2601, 100), torch.zeros(26 * 64 + 1, dtype=kind)
    indices = torch.zeros(1000, dtype=kind)
    one, two = torch.tensor([0, 1]), torch.zeros(1, dtype=kind)
    row = empty(1, 1), one, two, one
    found["embedding_bag single"] = bind(embedding._embedding_bag, *row, row[0][0], True, False)
    found["embedding_bag backward single"] = bind(
        embedding._embedding_bag_backward, empty(1, 1, 1), *row, row[0][0], True, True, True
    )
    for features in (16, 128, 1000):
        weight, up = empty(2600, features), empty(64, 26, features)
        numbers = weight, starts, indices, offsets
        found |= {
            f"embedding_bag {features}": bind(embedding._embedding_bag, *numbers, None, False, False),
            f"embedding_bag weighted {features}": bind(embedding._embedding_bag, *numbers, empty(1000), True, False),
            f"embedding_bag backward {features}": bind(
                embedding._embedding_bag_backward, up, *numbers, empty(1000), True, True, True
            ),
        }
    for tables, features in ((0, 1), (8, 64), (26, 128), (60, 128), (127, 100)):
        dense, sparse = empty(64, features), empty(64, tables, features)
        up = empty(64, features + tables * (tables + 1) // 2)
        found |= {
            f"interaction {tables}": bind(interaction._dot_interaction, dense, sparse),
            f"interaction backward {tables}": bind(interaction._dot_interaction_backward, up, dense, sparse),
        }
    return found


def steps(empty: Callable[..., torch.Tensor], *, masters: bool) -> None:
    """A step of AdamW on two tensors, with float32 moments."""
    first, second, wide = ([empty(size, kind=torch.float32) for size in (5000, 3)] for _ in range(3))
    parameters, gradients = ([empty(size) for size in (5000, 3)] for _ in range(2))
    lists = parameters, gradients, first, second, *([wide] if masters else [])
    adamw._launch(adamw._made(lists, first[0].device), lists, (0.5,) * 7)


def batch_norms(empty: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Launches of batch_norm: statistics (two), result, and backward (three); channels first, last, and odd sizes."""
    found: dict[str, Callable[[], Any]] = {}
    bind, wide = functools.partial, torch.float32
    sizes = {"": (64, 256, 56, 56), " odd": (9, 5, 7, 33), " last": (64, 56, 56, 256), " single": (2, 1, 1)}
    for name, shape in sizes.items():
        x = empty(*shape)
        if name == " last":
            x = x.movedim(-1, 1)
        vector, (mean, rest, scale) = empty(x.shape[1]), empty(3, x.shape[1], kind=wide)
        backward = bind(batch_norm_backward.batch_norm_backward, x, x)
        found |= {
            f"batch_norm statistics{name}": bind(batch_norm._statistics, x, mean, scale, 0.1, 1e-5),
            f"batch_norm{name}": bind(batch_norm._batch_norm, x, vector, vector, x, mean, rest, scale, 1e-5, True),
            f"batch_norm evaluation{name}": bind(
                batch_norm._batch_norm, x, vector, vector, None, mean, None, scale, 1e-5, False
            ),
            f"batch_norm backward{name}": bind(backward, x, vector, mean, rest, scale, 1e-5, True),
            f"batch_norm backward evaluation{name}": bind(backward, None, None, mean, None, scale, 1e-5, False),
        }
    return found


def few_rows(empty: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """One row and some, of an odd width: what Triton knows of a row's stride decides how a tile is spread."""
    found: dict[str, Callable[[], Any]] = {}
    bind = functools.partial
    for rows in (1, 2, 7):
        x, weight, labels = empty(rows, 3), empty(3), torch.zeros(rows, dtype=torch.int64)
        found |= {
            f"moe_gate, {rows} of 3": bind(moe_gate._moe_gate, x, 1, False),
            f"rms_norm, {rows} of 3": bind(rms_norm._forward, x, None, weight, 1e-6, "torch"),
            f"layer_norm, {rows} of 3": bind(layer_norm._forward, x, None, weight, weight, 1e-5),
            f"cross_entropy, {rows} of 3": bind(cross_entropy._losses, x, labels, -100, 0.0, 0.0, 0.0),
        }
    return found


def recorded(launch: Callable[[], Any]) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """The kernels that ``launch`` ends in, their arguments by name, and their compiler options."""
    calls: list[tuple[Any, dict[str, Any], dict[str, int]]] = []

    def recorder(kernel: Any) -> Callable[..., None]:
        def run(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            options = {name: named.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in named}
            calls.append((kernel, named, options))

        return run

    for kernel in KERNELS:
        kernel.run = recorder(kernel)
    launch()
    assert calls, "nothing was launched"
    return calls


def compiled(kernel: Any, arguments: dict[str, Any], options: dict[str, int]) -> Any:
    """Compile as Triton's launcher specialises: 1 is a constant, multiples of 16 and aligned pointers are known."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        if isinstance(value, TensorDescriptor):
            element = POINTERS[value.base.dtype].removeprefix("*")
            signature[parameter.name] = f"tensordesc<{element}{list(value.block_shape)}>"
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            aligned = value.data_ptr() % 16 == 0
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
            aligned = False
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def facts(result: Any) -> dict[str, Any]:
    """Registers per thread and bytes spilled (cuobjdump), bytes of shared memory, and what the PTX is made of."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout + usage.stderr))
    ptx = result.asm["ptx"]
    return {
        "registers": int(found["REG"]),
        "spilled": int(found["STACK"]) + int(found["LOCAL"]),
        "shared": int(result.metadata.shared),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "tf32": ptx.count("tf32"),
        "vector_loads": len(re.findall(r"ld\.global\S*\.v4", ptx)),
        "paired_loads": len(re.findall(r"ld\.global\S*\.v2", ptx)),
        "copies": len(re.findall(r"cp\.async\.(?:c|bulk\.tensor)", ptx)),
        "layouts": sorted(re.findall(r"= (#ttg\.blocked<.*>)", result.asm["ttgir"])),
    }


if __name__ == "__main__":
    chosen = getattr(torch, sys.argv[1])
    found = {
        f"{name} {number}" if number else name: facts(compiled(*call))
        for name, launch in launches(chosen).items()
        for number, call in enumerate(recorded(launch))
    }
    print(json.dumps(found))
