"""Launches of the suite's kernels that go through rows, tables or lists: norms, losses, elementwise, sampling."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from reference_kernels import _norm_backward, _sums
from reference_kernels.adamw import kernel as adamw
from reference_kernels.batch_norm import backward as batch_norm_backward
from reference_kernels.batch_norm import kernel as batch_norm
from reference_kernels.cross_entropy import kernel as cross_entropy
from reference_kernels.embedding import interaction
from reference_kernels.embedding import kernel as embedding
from reference_kernels.glu import kernel as glu
from reference_kernels.layer_norm import kernel as layer_norm
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
    glu._glu_kernel,
    glu._glu_backward_kernel,
    rope._rope_kernel,
    rope_cache._rope_cache_kernel,
    layer_norm._layer_norm_kernel,
    _norm_backward._rows_backward_kernel,
    _norm_backward._tilts_kernel,
    _norm_backward._columns_kernel,
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


def launches(empty: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Representative launches by name; ``empty`` makes a tensor of a shape, of dtype ``kind`` where one is given."""

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
    three = [empty(64, 8192)] * 3
    columns = empty(8192), empty(8192)
    vocabulary, number = empty(64, 128256), empty(64, kind=torch.float32)
    seen, whole = empty(64, 128256, kind=torch.bool), empty(64, kind=torch.int64)
    gates, chosen, slots = empty(32768, 256), empty(32768, 8), empty(32768, 8, kind=torch.int64)
    return {
        **softmaxes(empty),
        **rms_norms(empty),
        "glu silu": lambda: glu._glu(*halves, "silu"),
        "glu gelu": lambda: glu._glu(*halves, "gelu"),
        "glu gelu_tanh": lambda: glu._glu(*halves, "gelu_tanh"),
        "glu packed": lambda: glu._glu_packed(empty(64, 28672), "silu"),
        "glu packed narrow": lambda: glu._glu_packed(empty(64, 66), "silu"),
        "glu backward silu": lambda: glu._glu_backward(halves[0], *halves, "silu"),
        "glu backward gelu": lambda: glu._glu_backward(halves[0], *halves, "gelu"),
        "glu backward gelu_tanh": lambda: glu._glu_backward(halves[0], *halves, "gelu_tanh"),
        "glu backward packed": lambda: glu._glu_packed_backward(halves[0], empty(64, 28672), "silu"),
        "rope half": lambda: rope._rope(*heads, *angles, False, False),
        "rope interleaved": lambda: rope._rope(*heads, *angles, True, True),
        **rope_caches(empty),
        "rope partial": lambda: rope._rope(*partial, *(angle[:, :16] for angle in angles), False, False),
        **layer_norms(empty),
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
    bind, backward = functools.partial, _norm_backward
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
