"""Every operation of ``conch.ops`` (conch-triton-kernels) against its formula; all of them are forward only."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.outside.survey.model import Draw, Op, Package

EPS = 1e-6
ALL = ("float32", "float16", "bfloat16")

UNDEFINED = (
    "A real bug of Conch 1.3: the row is loaded with a mask and without `other`, and then summed over all lanes. "
    "Triton leaves what the masked-off ones hold undefined; sizes that are no power of two are right only where it is "
    "zero."
)
ALIASED = (
    "A real bug of Conch 1.3: `residual = x` names the sum, and the kernel then normalises the sum in place, so that "
    "the normalised row comes back twice and the residual is lost. Conch's own PyTorch reference returns the sum."
)
TANH = (
    "A real bug of Conch 1.3: it calls libdevice.tanh with a tile of the input's dtype, and libdevice has float32 and "
    "float64 alone. Compiled for sm_90 with Triton 3.7.1 the kernel fails with the same KeyError."
)
TOP_LEFT = (
    "A real bug of Conch 1.3: the mask compares a query's number among the queries, not its position in the sequence, "
    "with the key's; Conch's own PyTorch reference (tests/varlen_attention_test.py) adds the difference of the "
    "lengths. Only as many queries as keys, or a single one, are tested there."
)
UNMASKED = (
    "A real bug of Conch 1.3: the tiles of both matrices are loaded without a mask along K, and 64 of K at a time: for "
    "a K that is no multiple of 64 the kernel reads past the end and adds what it finds."
)
PAGE = 16

# Dettmers et al., "QLoRA", appendix E (NF4); the four-bit float of bitsandbytes.
NF4 = [
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
]  # fmt: skip
FP4 = [0.0, 0.0052083333, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25]
CODES = {"nf4": NF4, "fp4": FP4 + [-value for value in FP4]}


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def nearest(x: Tensor, codes: Tensor) -> Tensor:
    """Which code comes closest; of the two zeros of FP4 the one without a sign."""
    return (x[..., None] - codes).abs().argmin(-1)


def quantized(x: Tensor, codes: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The code of each element divided by the largest magnitude of its block, and those magnitudes."""
    largest = torch.stack([part.abs().max() for part in x.split(block)])
    return nearest(x / largest.repeat_interleave(block)[: x.numel()], codes), largest


def quantize_4bit(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Two codes to a byte, the first one in the upper half."""
    codes, largest = quantized(x, torch.tensor(CODES[kind], dtype=torch.float64), 64)
    # The kernel keeps the sign of what rounds to zero.
    if kind == "fp4":
        codes = torch.where((codes == 0) & (x < 0), 8, codes)
    return ((codes[::2] << 4) | codes[1::2]).byte()[:, None], largest


def dequantize_4bit(packed: Tensor, largest: Tensor, kind: str, size: int) -> Tensor:
    codes = torch.tensor(CODES[kind], dtype=torch.float64)
    pairs = torch.cat((packed >> 4, packed & 15), -1).flatten().long()
    return (codes[pairs] * largest.repeat_interleave(64)[: pairs.numel()])[:size]


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softcap: float) -> Tensor:
    """``(queries, heads, size)`` by ``(keys, kv_heads, size)``; the last query sees the last key."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        queries, keys = scores.shape[1:]
        future = torch.arange(keys)[None, :] > torch.arange(queries)[:, None] + keys - queries
        scores = scores.masked_fill(future, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    return cache[table.long()].flatten(0, 1)[:length]


def paged(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, softcap: float) -> Tensor:
    rows = []
    for i, n in enumerate(lengths.tolist()):
        keys, values = pages(k, table[i], n), pages(v, table[i], n)
        rows.append(attend(q[i : i + 1], keys, values, causal=False, softcap=softcap))
    return torch.cat(rows)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, table: Tensor, *, causal: bool, softcap: float
) -> Tensor:
    rows = []
    for i, n in enumerate(lengths.tolist()):
        keys, values = pages(k, table[i], n), pages(v, table[i], n)
        rows.append(attend(q[starts[i] : starts[i + 1]], keys, values, causal=causal, softcap=softcap))
    return torch.cat(rows)


def unpacked(packed: Tensor) -> Tensor:
    """Eight four-bit rows from each row of int32, the lowest bits first."""
    return torch.stack([(packed >> 4 * i) & 15 for i in range(8)], 1).flatten(0, 1)


def mixed(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> Tensor:
    weights = unpacked(packed) - (8 if zeros is None else zeros.repeat_interleave(group, 0))
    return x @ (weights * scales.repeat_interleave(group, 0))


def scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return (a.double() @ b.double()) * scale_a * scale_b.T


def iou(boxes: Tensor) -> Tensor:
    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    return shared / (area[:, None] + area[None, :] - shared)


def suppressed(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    overlap, kept = iou(boxes), []
    for i in scores.argsort(descending=True).tolist():
        if all(overlap[i, j] <= threshold for j in kept):
            kept.append(i)
    return torch.tensor(kept)


def bev_pool(features: Tensor, cells: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    out = torch.zeros(2, 3, 4, 5, features.shape[1], dtype=features.dtype)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        x, y, z, batch = cells[start].tolist()
        out[batch, z, x, y] = features[start : start + length].sum(0)
    return out


def bev_pool_backward(upstream: Tensor, cells: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    out = torch.zeros(cells.shape[0], upstream.shape[-1], dtype=upstream.dtype)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        x, y, z, batch = cells[start].tolist()
        out[start : start + length] = upstream[batch, z, x, y]
    return out


def voxels(points: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cells of half a unit in a box of 4 x 3 x 2 cells: how many points each has, and their sum."""
    cell = (points[:, :3] / 0.5).floor().long()
    size = torch.tensor((4, 3, 2))
    inside = ((cell >= 0) & (cell < size)).all(-1)
    flat = (cell[:, 2] * 3 + cell[:, 1]) * 4 + cell[:, 0]
    counts = torch.zeros(24, dtype=torch.long)
    sums = torch.zeros(24, 4, dtype=points.dtype)
    for index, point in zip(flat[inside].tolist(), points[inside], strict=True):
        if counts[index] < most:
            counts[index] += 1
            sums[index] += point
    return (counts > 0).sum()[None].int(), counts.int(), sums


def ops() -> list[Op]:  # noqa: C901 - a table with a small function in each row
    """Needs Conch, and a mended Triton imported before it."""
    from conch.ops.activation import gelu_tanh_and_mul, silu_and_mul
    from conch.ops.attention import paged_attention, varlen_attention
    from conch.ops.embedding import rotary_embedding
    from conch.ops.normalization import gemma_rms_norm, rms_norm
    from conch.ops.quantization import fp8, gemm, int8
    from conch.ops.quantization.bitsandbytes import functional as bnb
    from conch.ops.vision import bev_pool as bev
    from conch.ops.vision import nms, voxelization
    from conch.ops.vllm import copy_blocks, reshape_and_cache

    def rows(*shapes: tuple[int, ...]) -> Any:
        return lambda d: [d.normal(*shape) for shape in shapes]

    def rope_inputs(d: Draw) -> list[Any]:
        angle = torch.arange(20)[:, None] * 100.0 ** (-torch.arange(12) / 12)
        table = torch.cat((angle.cos(), angle.sin()), -1).to(d.dtype)
        return [d.integers(0, 20, 7), d.normal(7, 3 * 24), d.normal(7, 24), table]

    def rope(positions: Tensor, q: Tensor, k: Tensor, table: Tensor) -> list[Tensor]:
        cos, sin = table[positions][:, None].chunk(2, -1)
        turned = []
        for x in (q, k):
            left, right = x.unflatten(-1, (-1, 24)).chunk(2, -1)
            turned.append(torch.cat((left * cos - right * sin, right * cos + left * sin), -1).flatten(1))
        return turned

    def paged_inputs(d: Draw, most: int) -> list[Any]:
        lengths = torch.tensor([1, 37, most], dtype=torch.int32)
        per = -(-most // PAGE)
        table = d.permutation(3 * per).reshape(3, per).int()
        cache = (3 * per, PAGE, 2, 32)
        return [d.normal(3, 6, 32), d.normal(*cache), d.normal(*cache), table, lengths]

    def varlen_inputs(d: Draw, *, some: bool) -> list[Any]:
        # Queries for the whole sequence, one for its last position; `some`: for the last 3 of 37.
        lengths = torch.tensor([5, 37, 21])
        starts = torch.tensor([0, 5, 8, 29]) if some else torch.tensor([0, 5, 42, 43])
        table = d.permutation(9).reshape(3, 3).int()
        cache = (9, PAGE, 2, 32)
        queries = d.normal(int(starts[-1]), 6, 32)
        return [queries, d.normal(*cache), d.normal(*cache), starts.int(), lengths.int(), table]

    def run_varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, table: Tensor, **how: Any) -> Any:
        return varlen_attention.varlen_attention(q, k, v, starts, 37, lengths, 37, table, **how)

    def mixed_inputs(d: Draw, *, zeros: bool) -> list[Any]:
        packed = d.integers(-(2**31), 2**31, 16, 37, dtype=torch.int32)
        return [d.normal(5, 128), packed, d.uniform(2, 37, low=0.01, high=0.02)] + (
            [d.integers(0, 16, 2, 37, dtype=torch.int32).to(d.dtype)] if zeros else [None]
        )

    def scaled_inputs(d: Draw, k: int, n: int) -> list[Any]:
        a, b = d.integers(-127, 128, 5, k, dtype=torch.int8), d.integers(-127, 128, k, n, dtype=torch.int8)
        # Scales for which no element overflows float16.
        return [a, b, d.uniform(5, 1, low=0.01, high=0.1).float(), d.uniform(n, 1, low=0.01, high=0.1).float(), d.dtype]

    def cells(d: Draw) -> list[Tensor]:
        lengths = torch.tensor([1, 4, 2, 7, 3])
        starts = lengths.cumsum(0) - lengths
        picked = d.permutation(2 * 3 * 4 * 5)[:5]
        batch, rest = picked // 60, picked % 60
        spot = torch.stack((rest // 5 % 4, rest % 5, rest // 20, batch), -1)
        return [spot.repeat_interleave(lengths, 0).int(), starts.int(), lengths.int()]

    def boxes(d: Draw) -> list[Any]:
        corner = d.uniform(40, 2, high=4.0).float()
        size = d.uniform(40, 2, low=0.5, high=2.0).float()
        return [torch.cat((corner, corner + size), -1).to(d.dtype).float(), d.permutation(40).float()]

    def points(d: Draw) -> list[Any]:
        return [d.uniform(300, 4, low=-0.5, high=2.5).float()]

    def run_voxels(x: Tensor) -> tuple[Tensor, ...]:
        box = voxelization.VoxelizationParameter((0.0, 0.0, 0.0), (2.0, 1.5, 1.0), (0.5, 0.5, 0.5), 64)
        filled, features, where, counts = voxelization.generate_voxels(x, box)
        # Which cell comes first is up to the atomics.
        n = int(filled)
        flat = ((where[:n, 2] * 3 + where[:n, 1]) * 4 + where[:n, 0]).long()
        dense = torch.zeros(24, dtype=torch.int32).index_put((flat,), counts[:n])
        return filled, dense, torch.zeros(24, 4).index_put((flat,), features[:n].sum(1))

    def cache_inputs(d: Draw) -> list[Any]:
        cache = (5, PAGE, 2, 24)
        slots = d.permutation(5 * PAGE)[:9]
        return [d.normal(9, 2, 24), d.normal(9, 2, 24), d.normal(*cache), d.normal(*cache), slots]

    def cached(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        k_cache[slots // PAGE, slots % PAGE], v_cache[slots // PAGE, slots % PAGE] = k, v
        return k_cache, v_cache

    def run_cached(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        reshape_and_cache.reshape_and_cache(k, v, k_cache, v_cache, slots)
        return k_cache, v_cache

    def blocks(d: Draw) -> list[Any]:
        return [
            [d.normal(6, 77) for _ in range(2)],
            [d.normal(6, 77) for _ in range(2)],
            torch.tensor([[0, 3], [1, 5]]),
        ]

    def copied(k: list[Tensor], v: list[Tensor], pairs: Tensor) -> list[Tensor]:
        for cache in (*k, *v):
            cache[pairs[:, 1]] = cache[pairs[:, 0]]
        return [*k, *v]

    def run_copied(k: list[Tensor], v: list[Tensor], pairs: Tensor) -> list[Tensor]:
        copy_blocks.copy_blocks(k, v, pairs)
        return [*k, *v]

    def run_quantize(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        packed, state = bnb.quantize_4bit(x, quant_type=kind)
        return packed, state.absmax

    def packed_inputs(d: Draw) -> list[Any]:
        return [d.integers(0, 256, 65, 1, dtype=torch.uint8), torch.tensor([0.7, 1.9, 0.3])]

    def run_dequantize(packed: Tensor, largest: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
        return bnb.dequantize_4bit(packed, absmax=largest, out=torch.empty(130, dtype=dtype), quant_type=kind)

    dynamic = bnb._create_dynamic_map()

    def run_quantize_8bit(x: Tensor) -> tuple[Tensor, Tensor]:
        codes, state = bnb.quantize_blockwise(x, code=dynamic, blocksize=64, quant_type="fp8")
        return codes, state.absmax

    def quantize_8bit(x: Tensor) -> tuple[Tensor, Tensor]:
        codes, largest = quantized(x, dynamic.double(), 64)
        return codes.byte(), largest

    def run_dequantize_8bit(codes: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(130, dtype=dtype)
        return bnb.dequantize_blockwise(codes, absmax=largest, code=dynamic, out=out, blocksize=64, quant_type="fp8")

    def dequantize_8bit(codes: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
        return dynamic.double()[codes.long()] * largest.repeat_interleave(64)[:130]

    def int8_reference(x: Tensor, scale: Tensor) -> Tensor:
        # In float32, as documented by what it is called with; the cast drops the fraction.
        return (x.float() * (1 / scale.float())).clamp(-128, 127).to(torch.int8)

    def fp8_reference(x: Tensor, scale: Tensor) -> Tensor:
        return (x.float() * (1 / scale.float())).clamp(-448, 448).to(torch.float8_e4m3fn).double()

    def norms(size: int) -> list[Op]:
        x, w = (5, size), (size,)
        bugs = {} if size == 32 else dict.fromkeys(ALL, UNDEFINED)
        return [
            Op(f"rms_norm, {size}", rows(x, w), lambda x, w: rms_norm.rms_norm(x, w, EPS), lambda x, w: unit(x) * w,
               covers=("rms_norm",), bugs=bugs),
            Op(f"fused_add_rms_norm, {size}", rows(x, x, w), lambda x, r, w: rms_norm.fused_add_rms_norm(x, r, w, EPS),
               lambda x, r, w: (unit(x + r) * w, x + r), covers=("fused_add_rms_norm",), bugs=bugs),
            Op(f"gemma_rms_norm, {size}", rows(x, w), lambda x, w: gemma_rms_norm.gemma_rms_norm(x, w, EPS),
               lambda x, w: unit(x) * (1 + w), covers=("gemma_rms_norm",), bugs=bugs),
            Op(f"gemma_rms_norm, with residual, {size}", rows(x, w, x),
               lambda x, w, r: gemma_rms_norm.gemma_rms_norm(x, w, EPS, r),
               lambda x, w, r: (unit(x + r) * (1 + w), x + r), covers=("gemma_rms_norm",),
               bugs=dict.fromkeys(ALL, ALIASED)),
        ]  # fmt: skip

    scale = torch.tensor([0.021])
    return [
        Op("gelu_tanh_and_mul", rows((5, 66)), gelu_tanh_and_mul.gelu_tanh_and_mul,
           lambda x: F.gelu(x[..., :33], approximate="tanh") * x[..., 33:],
           bugs=dict.fromkeys(("float16", "bfloat16"), TANH)),
        Op("silu_and_mul", rows((2, 5, 66)), silu_and_mul.silu_and_mul, lambda x: F.silu(x[..., :33]) * x[..., 33:]),
        *(entry for size in (32, 33) for entry in norms(size)),
        Op("rotary_embedding", rope_inputs,
           lambda p, q, k, t: rotary_embedding.rotary_embedding(p, q, k, 24, t), rope),
        Op("paged_attention", partial(paged_inputs, most=61), paged_attention.paged_attention,
           lambda *x: paged(*x, softcap=0.0)),
        Op("paged_attention, split keys, softcap", partial(paged_inputs, most=300),
           lambda *x: paged_attention.paged_attention(*x, softcap=2.0), lambda *x: paged(*x, softcap=2.0),
           covers=("paged_attention",)),
        Op("varlen_attention", partial(varlen_inputs, some=True), run_varlen,
           partial(varlen, causal=False, softcap=0.0)),
        Op("varlen_attention, causal, softcap", partial(varlen_inputs, some=False),
           partial(run_varlen, causal=True, softcap=2.0), partial(varlen, causal=True, softcap=2.0),
           covers=("varlen_attention",)),
        Op("varlen_attention, causal, fewer queries than keys", partial(varlen_inputs, some=True),
           partial(run_varlen, causal=True), partial(varlen, causal=True, softcap=0.0), covers=("varlen_attention",),
           bugs=dict.fromkeys(ALL, TOP_LEFT)),
        Op("mixed_precision_gemm", partial(mixed_inputs, zeros=False),
           lambda x, w, s, z: gemm.mixed_precision_gemm(x, w, s, z, 4, 8, 64), partial(mixed, group=64), slack=2.0),
        Op("mixed_precision_gemm, zero points", partial(mixed_inputs, zeros=True),
           lambda x, w, s, z: gemm.mixed_precision_gemm(x, w, s, z, 4, 0, 64), partial(mixed, group=64), slack=2.0,
           covers=("mixed_precision_gemm",)),
        Op("scaled_gemm", partial(scaled_inputs, k=128, n=64), gemm.scaled_gemm, scaled),
        Op("scaled_gemm, 67 deep", partial(scaled_inputs, k=67, n=64), gemm.scaled_gemm, scaled,
           covers=("scaled_gemm",), bugs=dict.fromkeys(ALL, UNMASKED)),
        Op("scaled_int8_quant", lambda d: [d.normal(5, 33), scale],
           lambda x, s: int8.scaled_int8_quant(x, s)[0], int8_reference),
        Op("static_scaled_int8_quant", lambda d: [d.normal(5, 33), scale],
           lambda x, s: [out := torch.zeros(5, 33, dtype=torch.int8), int8.static_scaled_int8_quant(out, x, s)],
           int8_reference),
        Op("scaled_fp8_quant", lambda d: [d.normal(5, 33), scale],
           lambda x, s: fp8.scaled_fp8_quant(x, s)[0].double(), fp8_reference),
        Op("static_scaled_fp8_quant", lambda d: [d.normal(5, 33), scale],
           lambda x, s: (fp8.static_scaled_fp8_quant(out := torch.zeros(5, 33, dtype=torch.float8_e4m3fn), x, s),
                         out.double()),
           fp8_reference),
        *(Op(f"quantize_4bit, {kind}", lambda d: [d.normal(130)], partial(run_quantize, kind=kind),
             partial(quantize_4bit, kind=kind), covers=("quantize_4bit",)) for kind in CODES),
        *(Op(f"dequantize_4bit, {kind}", lambda d: [*packed_inputs(d), d.dtype],
             lambda p, a, dtype, kind=kind: run_dequantize(p, a, kind, dtype),
             lambda p, a, dtype, kind=kind: dequantize_4bit(p, a, kind, 130), covers=("dequantize_4bit",))
          for kind in CODES),
        Op("quantize_blockwise, 8 bits", lambda d: [d.normal(131)], run_quantize_8bit, quantize_8bit,
           covers=("quantize_blockwise",)),
        Op("dequantize_blockwise, 8 bits",
           lambda d: [d.integers(0, 256, 130, dtype=torch.uint8), torch.tensor([0.7, 1.9, 0.3]), d.dtype],
           run_dequantize_8bit, dequantize_8bit, covers=("dequantize_blockwise",)),
        Op("bev_pool", lambda d: [d.normal(17, 33), *cells(d)], lambda *x: bev.bev_pool(*x, 2, 3, 4, 5), bev_pool),
        Op("bev_pool_backward", lambda d: [d.normal(2, 3, 4, 5, 33), *cells(d)], bev.bev_pool_backward,
           bev_pool_backward),
        Op("nms", boxes, lambda b, s: nms.nms(b, s, 0.3), lambda b, s: suppressed(b, s, 0.3), dtypes=(torch.float32,)),
        Op("generate_voxels", points, run_voxels, lambda x: voxels(x, 64), dtypes=(torch.float32,)),
        Op("reshape_and_cache", cache_inputs, run_cached, cached),
        Op("copy_blocks", blocks, run_copied, copied),
    ]  # fmt: skip


def public() -> list[str]:
    """The functions that the modules of ``conch.ops`` define, but for those that only compute shapes and metadata."""
    import importlib
    import inspect
    from pathlib import Path

    import conch.ops

    helpers = {"create_mixed_precision_metadata", "create_scaled_metadata", "get_absmax_shape"}
    helpers.add("get_quantized_output_shape")
    found = set()
    for folder in conch.ops.__path__:  # some of its folders are packages without an __init__.py
        for path in Path(folder).rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            module = importlib.import_module(".".join(("conch.ops", *parts)).removesuffix(".__init__"))
            for name, value in vars(module).items():
                if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
                    found.add(name)
    return sorted(found - helpers)


PACKAGE = Package("Conch", "conch-triton-kernels", "Apache-2.0", ops, lambda: len(public()), dict)
