# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Grouped-query attention, causal and bottom-right aligned.

Float32 softmax and sums, one rounding to ``q.dtype`` at the end.

``q`` is ``(heads, queries, features)``, ``k`` and ``v`` are ``(kv_heads, keys, features)``; query ``i`` sees the keys
up to ``i + keys - queries``, at most ``window`` of them when ``window`` is positive. A query that sees no key gives
zero. Products of a masked weight with an infinite value are nobody's contract, so all values are finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor, values

TILE = 16


def reference(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    heads, queries, features = q.shape
    kv_heads, keys, _ = k.shape
    group = heads // kv_heads
    k, v = k.float().repeat_interleave(group, 0), v.float().repeat_interleave(group, 0)
    score = q.float() @ k.transpose(1, 2) * features**-0.5
    last = torch.arange(queries, device=q.device)[:, None] + keys - queries
    key = torch.arange(keys, device=q.device)[None, :]
    visible = key <= last
    if window:
        visible = visible & (key > last - window)
    weight = torch.softmax(score.masked_fill(~visible, -torch.inf), -1)
    return (torch.where(visible.any(-1, keepdim=True), weight, 0.0) @ v).to(q.dtype)


@triton.jit
def attention_kernel(
    q, k, v, out, queries, keys, features, group, kv_heads, window, scale,
    q_head, q_row, q_col, k_head, k_row, k_col, v_head, v_row, v_col,
    TILE: tl.constexpr, WIDTH: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    kv_head = head // group
    if BUG == "modulo-group":
        kv_head = head % kv_heads
    r = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    d = tl.arange(0, WIDTH)
    if BUG == "head-by-row-pitch":
        source = q + (head * q_head) // q_row * q_row
    else:
        source = q + head * q_head
    query = tl.load(source + r * q_row + d[None, :] * q_col, mask=(r < queries) & (d < features)[None, :], other=0.0)
    last = r + keys - queries
    if BUG == "top-left":
        last = r
    top = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, WIDTH], tl.float32)
    for start in range(0, keys, TILE):
        n = start + tl.arange(0, TILE)
        key_mask = (n < keys)[:, None] & (d < features)[None, :]
        key = tl.load(k + kv_head * k_head + n[:, None] * k_row + d[None, :] * k_col, mask=key_mask, other=0.0)
        value = tl.load(v + kv_head * v_head + n[:, None] * v_row + d[None, :] * v_col, mask=key_mask, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        visible = (n[None, :] <= last) & (n < keys)[None, :]
        if BUG == "tail-tile":
            visible = (n[None, :] <= last) & (start < keys)
            visible = visible | ((n >= keys)[None, :] & (r < queries))
        if window > 0:
            if BUG == "window-inclusive":
                visible = visible & (n[None, :] >= last - window)
            else:
                visible = visible & (n[None, :] > last - window)
        score = tl.where(visible, score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        shift = higher
        if BUG != "masked-query":
            shift = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp(score - shift[:, None])
        fade = tl.exp(top - shift)
        if BUG == "output-not-rescaled":
            mixed = mixed + tl.dot(weight, value.to(tl.float32), input_precision="ieee")
        else:
            mixed = mixed * fade[:, None] + tl.dot(weight, value.to(tl.float32), input_precision="ieee")
        total = total * fade + tl.sum(weight, axis=1)
        top = higher
    if BUG == "masked-query":
        result = mixed / total[:, None]
    else:
        result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    at = out + (head * queries + r) * features + d[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(r < queries) & (d < features)[None, :])


def attention(q: Tensor, k: Tensor, v: Tensor, window: int, *, bug: str = "") -> Tensor:
    heads, queries, features = q.shape
    kv_heads, keys, _ = k.shape
    out = torch.empty((heads, queries, features), dtype=q.dtype, device=q.device)
    width = max(TILE, triton.next_power_of_2(features))
    scale = (width if bug == "scale-of-padded" else features) ** -0.5
    if out.numel():
        attention_kernel[(heads, triton.cdiv(queries, TILE))](
            q, k, v, out, queries, keys, features, heads // kv_heads, kv_heads, window, scale,
            *q.stride(), *k.stride(), *v.stride(), TILE=TILE, WIDTH=width, BUG=bug,
        )  # fmt: skip
    return out


@triton.jit
def two_pass_kernel(
    q, k, v, out, queries, keys, features, group, window, scale,
    q_head, q_row, q_col, k_head, k_row, k_col, v_head, v_row, v_col,
    KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    kv_head = head // group
    d = tl.arange(0, WIDTH)
    n = tl.arange(0, KEYS)
    inside = (n < keys)[:, None] & (d < features)[None, :]
    query = tl.load(q + head * q_head + row * q_row + d * q_col, mask=d < features, other=0.0).to(tl.float32)
    key = tl.load(k + kv_head * k_head + n[:, None] * k_row + d[None, :] * k_col, mask=inside, other=0.0)
    score = tl.sum(query[None, :] * key.to(tl.float32), axis=1) * scale
    last = row + keys - queries
    visible = (n < keys) & (n <= last)
    if window > 0:
        visible = visible & (n > last - window)
    score = tl.where(visible, score, -float("inf"))
    top = tl.max(score, axis=0)
    weight = tl.exp(score - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(weight, axis=0)
    weight = weight / tl.where(total == 0.0, 1.0, total)
    value = tl.load(v + kv_head * v_head + n[:, None] * v_row + d[None, :] * v_col, mask=inside, other=0.0)
    result = tl.sum(weight[:, None] * value.to(tl.float32), axis=0)
    tl.store(out + (head * queries + row) * features + d, result.to(out.dtype.element_ty), mask=d < features)


def attention_two_pass(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """All keys in one tile, normalised before the second product, no dot instruction."""
    heads, queries, features = q.shape
    kv_heads, keys, _ = k.shape
    out = torch.zeros((heads, queries, features), dtype=q.dtype, device=q.device)
    if out.numel() and keys:
        two_pass_kernel[(heads, queries)](
            q, k, v, out, queries, keys, features, heads // kv_heads, window, features**-0.5,
            *q.stride(), *k.stride(), *v.stride(),
            KEYS=triton.next_power_of_2(keys), WIDTH=triton.next_power_of_2(features),
        )  # fmt: skip
    return out


def make_spec(bug: str = "", *, window: int = 0, two_pass: bool = False) -> FusionSpec:
    def fused(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        return attention_two_pass(q, k, v, window) if two_pass else attention(q, k, v, window, bug=bug)

    return FusionSpec(
        name=f"attention{'_two_pass' if two_pass else ''} window={window} {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={
            "q": tensor("heads queries features", values=values.normal()),
            "k": tensor("kv_heads keys features", values=values.normal()),
            "v": tensor("kv_heads keys features", values=values.normal()),
            "window": window,
        },
        dims={
            "kv_heads": dim(1, 3),
            "heads": dim(0, 6, multiple_of="kv_heads"),
            "queries": dim(0, 6 if two_pass else 20),
            "keys": dim(0, 36),
            "features": dim(1, 40),
        },
    )
