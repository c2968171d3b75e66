# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Causal attention over packed sequences of different lengths: grouped heads, a window, a slope of distance per head.

``q`` is ``(total, heads, features)``, ``k`` and ``v`` ``(total, kv_heads, features)``, ``bounds`` int32 with the first
row of each sequence and the end, ``slopes`` float32 ``(heads,)``; ``longest``, a Python number, is the longest length,
of which the launch is made. float32 inside, one rounding at the end.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, derived, dim, tensor, values

WINDOW = 5


def reference(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, slopes: Tensor, longest: int) -> Tensor:
    group, found = q.shape[1] // k.shape[1], []
    for first, end in itertools.pairwise(bounds.tolist()):
        keys, mixed = (t[first:end].float().repeat_interleave(group, 1) for t in (k, v))
        score = torch.einsum("ihd,jhd->hij", q[first:end].float(), keys) * q.shape[2] ** -0.5
        at = torch.arange(end - first, device=q.device)
        distance = at[:, None] - at[None, :]
        score = score - slopes[:, None, None] * distance
        score = score.masked_fill((distance < 0) | (distance >= WINDOW), -torch.inf)
        found.append(torch.einsum("hij,jhd->ihd", score.softmax(-1), mixed).to(q.dtype))
    return torch.cat(found)


@triton.jit
def attend(
    q, k, v, bounds, slopes, out, scale, features, q_row, q_head, q_col, k_row, k_head, k_col, v_row, v_head, v_col,
    out_row, out_head, GROUP: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    sequence, head, i = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(bounds + sequence).to(tl.int64), tl.load(bounds + sequence + 1)
    if first + i >= end:
        return
    c = tl.arange(0, WIDTH)
    inside = c < features
    query = tl.load(q + (first + i) * q_row + head * q_head + c * q_col, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(slopes + head)
    top, total = -float("inf"), 0.0
    mixed = tl.zeros([WIDTH], tl.float32)
    for start in range(tl.maximum(i - WINDOW + 1, 0), i + 1, KEYS):
        j = start + tl.arange(0, KEYS)
        seen = j <= i
        both = seen[:, None] & inside[None, :]
        at_k = (first + j)[:, None] * k_row + (head // GROUP) * k_head + c[None, :] * k_col
        at_v = (first + j)[:, None] * v_row + (head // GROUP) * v_head + c[None, :] * v_col
        keys = tl.load(k + at_k, mask=both, other=0.0).to(tl.float32)
        score = tl.sum(keys * query[None, :], axis=1) * scale - slope * (i - j).to(tl.float32)
        score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, axis=0))
        weight, shrunk = tl.exp(score - higher), tl.exp(top - higher)
        mixed = mixed * shrunk + tl.sum(
            weight[:, None] * tl.load(v + at_v, mask=both, other=0.0).to(tl.float32), axis=0
        )
        total = total * shrunk + tl.sum(weight, axis=0)
        top = higher
    at = out + (first + i) * out_row + head * out_head + c
    tl.store(at, (mixed / total).to(out.dtype.element_ty), mask=inside)


def attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, slopes: Tensor, longest: int) -> Tensor:
    total, heads, features = q.shape
    out = torch.empty((total, heads, features), dtype=q.dtype, device=q.device)
    if out.numel():
        attend[(len(bounds) - 1, heads, longest)](
            q, k, v, bounds, slopes, out, features**-0.5, features, *q.stride(), *k.stride(), *v.stride(),
            *out.stride()[:2], GROUP=heads // k.shape[1], WINDOW=WINDOW, WIDTH=triton.next_power_of_2(features), KEYS=8,
        )  # fmt: skip
    return out


def _bounds(generator: torch.Generator, total: int) -> Tensor:
    cuts = torch.randint(0, total + 1, (3,), generator=generator, device=generator.device)
    ends = torch.tensor([0, total], device=generator.device)
    return torch.cat([cuts, ends]).sort().values.to(torch.int32)


def _slopes(q: Tensor) -> Tensor:
    return 2.0 ** -torch.arange(1, q.shape[1] + 1, device=q.device, dtype=torch.float32)


def make_spec() -> FusionSpec:
    return FusionSpec(
        name="varlen attention",
        fused=attention,
        reference=reference,
        inputs={
            "q": tensor("total heads features", values=values.finite()),
            "k": tensor("total kv_heads features", values=values.finite()),
            "v": tensor("total kv_heads features", values=values.finite()),
            "bounds": derived(_bounds),
            "slopes": derived(_slopes),
            "longest": derived(lambda bounds: int(bounds.diff().max())),
        },
        dims={
            "total": dim(0, 40),
            "heads": dim(1, 4, multiple_of="kv_heads"),
            "kv_heads": dim(1, 4),
            "features": dim(1, 32),
        },
    )
