"""Conch, forward only, as it is."""

# ruff: noqa: PLW0108 - the names of the lambdas' parameters are those of the inputs
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_fusion import derived, dim, tensor, values
from tests.outside.census import formulas
from tests.outside.census.entry import Kernel, kernel
from tests.outside.census.formulas import EPS

PAGE = 16
IN_PLACE = "Conch 1.3: `gemma_rms_norm` overwrites its input, and loses the residual"
HALVES = dict.fromkeys(("raises", "does-not-compile"), "Conch 1.3: GELU in 16 bits does not compile")
MORE_KEYS = {"unexplained": "Conch 1.3: causal attention over more keys than queries"}
IN_FLOAT16 = "Conch 1.3: paged attention adds up in float16"
PAST_THE_END = {"out-of-bounds": "Conch 1.3: products read past the end along K and N"}


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    return formulas.rms_norm(x, 1 + weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return formulas.rms_norm(total, weight), total


def rope(positions: Tensor, q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM's: ``(tokens, heads * size)`` turned by the row of ``(positions, size)`` of cosines and sines."""
    cos, sin = table[positions][:, None].chunk(2, -1)

    def turned(x: Tensor) -> Tensor:
        left, right = x.unflatten(-1, (-1, table.shape[1])).chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).flatten(1)

    return turned(q), turned(k)


def paged_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """One query of each sequence, over its keys in pages of ``table``."""
    out = []
    for i, length in enumerate(lengths.tolist()):
        keys, held = (cache[table[i].long()].flatten(0, 1)[:length] for cache in (k, v))
        group = q.shape[1] // keys.shape[1]
        keys, held = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, held))
        out.append(formulas.attention(q[i][:, None], keys, held, causal=False)[:, 0])
    return torch.stack(out)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
    """The last queries of each sequence, causal, over its keys in pages of ``table``."""
    out = []
    for i, length in enumerate(lengths.tolist()):
        keys, held = (cache[table[i].long()].flatten(0, 1)[:length] for cache in (k, v))
        queries = q[starts[i] : starts[i + 1]]
        group = q.shape[1] // keys.shape[1]
        keys, held = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, held))
        out.append(formulas.attention(queries.transpose(0, 1), keys, held, causal=True).transpose(0, 1))
    return torch.cat(out)


def int8_quant(x: Tensor, scale: Tensor) -> Tensor:
    """As its own reference in PyTorch, which drops the fraction."""
    return (x * scale.reciprocal()).clamp(-128, 127).to(torch.int8)


def fp8_quant(x: Tensor, scale: Tensor) -> Tensor:
    return (x * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)


def cached(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    k_cache.view(-1, *k.shape[1:])[slots] = k
    v_cache.view(-1, *v.shape[1:])[slots] = v


def mixed(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Eight four-bit rows from each row of int32, the lowest bits first; zero is 8; groups of 64 rows."""
    weights = torch.stack([(packed >> 4 * i) & 15 for i in range(8)], 1).flatten(0, 1) - 8
    return x @ (weights * scales.repeat_interleave(64, 0))


def scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return ((a.double() @ b.double()) * scale_a * scale_b.T).to(torch.bfloat16)


def turns(rows: int, half: int, q: Tensor) -> Tensor:
    angle = formulas.angles(rows, half, q)
    return torch.cat((angle.cos(), angle.sin()), -1).to(q.dtype)


def pages(batch: int, each: int, blocks: int, generator: torch.Generator) -> Tensor:
    return torch.randint(blocks, (batch, each), generator=generator, device=generator.device, dtype=torch.int32)


def lengths(batch: int, each: int, generator: torch.Generator) -> Tensor:
    return torch.randint(1, each * PAGE + 1, (batch,), generator=generator, device=generator.device, dtype=torch.int32)


def starts(batch: int, queries: int, q: Tensor) -> Tensor:
    return queries * torch.arange(batch + 1, device=q.device, dtype=torch.int32)


def at_least(batch: int, queries: int, each: int, generator: torch.Generator) -> Tensor:
    """Lengths of sequences of which ``queries`` are the last positions."""
    most = each * PAGE + 1
    return torch.randint(queries, most, (batch,), generator=generator, device=generator.device, dtype=torch.int32)


def as_many(batch: int, queries: int, q: Tensor) -> Tensor:
    """Lengths of sequences whose positions are all queries."""
    return torch.full((batch,), queries, device=q.device, dtype=torch.int32)


def slots(tokens: int, blocks: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(blocks * PAGE, generator=generator, device=generator.device)[:tokens]


def kernels() -> list[Kernel]:
    from conch.ops.activation import gelu_tanh_and_mul as gelu
    from conch.ops.activation import silu_and_mul as silu
    from conch.ops.attention import paged_attention as paged
    from conch.ops.attention import varlen_attention as varlen
    from conch.ops.embedding import rotary_embedding
    from conch.ops.normalization import gemma_rms_norm, rms_norm
    from conch.ops.quantization import fp8, gemm, int8
    from conch.ops.vllm import reshape_and_cache

    def stored(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        reshape_and_cache.reshape_and_cache(k, v, k_cache, v_cache, slots)

    rows = {"rows": dim(1), "n": dim(1, 8192)}
    halves = {"x": tensor("rows 2*half")}
    normed = {"x": tensor("rows n"), "weight": tensor("n")}
    scaled_by = {"x": tensor("rows n"), "scale": tensor("1", dtype=torch.float32, values=values.uniform(0.01, 0.1))}
    return [
        kernel("rms_norm", lambda x, weight: rms_norm.rms_norm(x, weight, EPS), formulas.rms_norm, normed, dims=rows),
        kernel("fused_add_rms_norm", lambda x, residual, weight:
               rms_norm.fused_add_rms_norm(x, residual, weight, EPS), add_rms_norm,
               {"x": tensor("rows n"), "residual": tensor("rows n"), "weight": tensor("n")}, dims=rows,
               clobbers=("x", "residual")),
        kernel("gemma_rms_norm", lambda x, weight: gemma_rms_norm.gemma_rms_norm(x, weight, EPS), gemma, normed,
               dims=rows, proved=dict.fromkeys(("mutates-input", "aliasing"), IN_PLACE)),
        kernel("silu_and_mul", lambda x: silu.silu_and_mul(x),
               lambda x: F.silu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :], halves,
               dims={"rows": dim(1), "half": dim(1)}),
        kernel("gelu_tanh_and_mul", lambda x: gelu.gelu_tanh_and_mul(x),
               lambda x: F.gelu(x[:, : x.shape[1] // 2], approximate="tanh") * x[:, x.shape[1] // 2 :], halves,
               dims={"rows": dim(1), "half": dim(1)}, proved=HALVES),
        kernel("rotary_embedding", lambda positions, q, k, table:
               tuple(rotary_embedding.rotary_embedding(positions, q, k, table.shape[1], table)), rope,
               {"positions": tensor("tokens", dtype=torch.int64, values=values.indices("rows")),
                "q": tensor("tokens heads*2*half"), "k": tensor("tokens kv_heads*2*half"), "table": derived(turns)},
               dims={"tokens": dim(1), "rows": dim(1, 100), "heads": dim(1, 8), "kv_heads": dim(1, 8),
                     "half": dim(1, 64)}, clobbers=("q", "k")),
        kernel("paged_attention", lambda q, k, v, table, lengths: paged.paged_attention(q, k, v, table, lengths),
               paged_attention,
               {"q": tensor("batch heads size"), "k": tensor("blocks 16 kv_heads size"),
                "v": tensor("blocks 16 kv_heads size"), "table": derived(pages), "lengths": derived(lengths)},
               dims={"batch": dim(1, 4), "blocks": dim(1, 8), "each": dim(1, 4), "kv_heads": dim(1, 2),
                     "heads": dim(1, 8, multiple_of="kv_heads"), "size": dim(32, 128, multiple_of=32)},
               proved=dict.fromkeys(("low-precision-accumulation", "overflow"), IN_FLOAT16)),
        *(kernel(name, lambda q, k, v, starts, lengths, table: varlen.varlen_attention(
                 q, k, v, starts, int(starts[1]), lengths, k.shape[1] * table.shape[1], table, causal=True),
                 varlen_attention,
                 {"q": tensor("batch*queries heads size", layouts=laid),
                  "k": tensor("blocks 16 kv_heads size", layouts=laid),
                  "v": tensor("blocks 16 kv_heads size", layouts=laid),
                  "starts": derived(starts), "lengths": derived(found), "table": derived(pages)},
                 dims={"batch": dim(1, 4), "queries": dim(1, 16), "blocks": dim(1, 8), "each": dim(1, 4),
                       "kv_heads": dim(1, 2), "heads": dim(1, 8, multiple_of="kv_heads"),
                       "size": dim(32, 128, multiple_of=32)}, proved=proved)
          for name, found, laid, proved in (
              ("varlen_attention", at_least, ("contiguous",), MORE_KEYS),
              ("varlen_attention, as many keys as queries", as_many, None, {}))),
        kernel("scaled_int8_quant", lambda x, scale: int8.scaled_int8_quant(x, scale)[0], int8_quant,
               {**scaled_by, "x": tensor("rows n", values=values.finite())}, dims=rows),  # NaN is no integer
        kernel("scaled_fp8_quant", lambda x, scale: fp8.scaled_fp8_quant(x, scale)[0], fp8_quant, scaled_by,
               dims=rows),
        kernel("reshape_and_cache", stored, cached,
               {"k": tensor("tokens heads size"), "v": tensor("tokens heads size"),
                "k_cache": tensor("blocks 16 heads size", layouts=("contiguous",)),
                "v_cache": tensor("blocks 16 heads size", layouts=("contiguous",)), "slots": derived(slots)},
               dims={"tokens": dim(1, 16), "blocks": dim(1, 6), "heads": dim(1, 4), "size": dim(1, 128)},
               mutates=("k_cache", "v_cache")),
        kernel("mixed_precision_gemm", lambda x, packed, scales:
               gemm.mixed_precision_gemm(x, packed, scales, None, 4, 8, 64), mixed,
               {"x": tensor("rows 64*groups"),
                "packed": tensor("8*groups n", dtype=torch.int32, values=values.integers(-(2**31), 2**31 - 1)),
                "scales": tensor("groups n", values=values.uniform(0.01, 0.02))},
               dims={"rows": dim(1, 40), "groups": dim(1, 4), "n": dim(1, 80)},
               dtypes=(torch.float16, torch.bfloat16), proved=PAST_THE_END),
        kernel("scaled_gemm", lambda a, b, scale_a, scale_b: gemm.scaled_gemm(a, b, scale_a, scale_b, torch.bfloat16),
               scaled,
               {"a": tensor("rows inner", dtype=torch.int8, values=values.integers(-127, 127)),
                "b": tensor("inner n", dtype=torch.int8, values=values.integers(-127, 127)),
                "scale_a": tensor("rows 1", dtype=torch.float32, values=values.uniform(0.01, 0.1)),
                "scale_b": tensor("n 1", dtype=torch.float32, values=values.uniform(0.01, 0.1))},
               dims={"rows": dim(1, 40), "inner": dim(1, 200), "n": dim(1, 80)}, wide=(0,), proved=PAST_THE_END),
    ]  # fmt: skip
