# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Top-2 gate: softmax weights of the two best experts and their ids; ties go to the lower id.

``logits`` is ``(tokens, experts)`` with at least two experts; the result is ``(weights, ids)``, float32 and int32,
``(tokens, 2)``. NaN and -Inf count as -1e30 and +Inf as 1e30, so that an id is always one of an expert (sglang
#30079).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor


def reference(logits: Tensor) -> tuple[Tensor, Tensor]:
    score = torch.nan_to_num(logits.float(), nan=-1e30, posinf=1e30, neginf=-1e30)
    order = torch.sort(score, dim=-1, descending=True, stable=True).indices[:, :2]
    return torch.softmax(score, -1).gather(-1, order), order.to(torch.int32)


@triton.jit
def gate_kernel(
    logits, weights, ids, tokens, experts, row_pitch, col_pitch,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, BLOCK)[None, :]
    inside = (r < tokens)[:, None] & (e < experts)
    score = tl.load(logits + r[:, None] * row_pitch + e * col_pitch, mask=inside, other=0.0).to(tl.float32)
    if BUG != "nan-sentinel":
        score = tl.where(score != score, -1e30, score)
    score = tl.where(score == float("inf"), 1e30, tl.where(score == -float("inf"), -1e30, score))
    if BUG == "pads-with-zero":
        ranked = score
    else:
        ranked = tl.where(e < experts, score, -float("inf"))
    first = tl.max(ranked, axis=1)
    first_id = tl.min(tl.where(ranked == first[:, None], e, BLOCK), axis=1)
    if BUG == "drops-ties":
        rest = tl.where(ranked == first[:, None], -float("inf"), ranked)
    else:
        rest = tl.where(e == first_id[:, None], -float("inf"), ranked)
    second = tl.max(rest, axis=1)
    second_id = tl.min(tl.where((rest == second[:, None]) & (e != first_id[:, None]), e, BLOCK), axis=1)
    total = tl.sum(tl.where(e < experts, tl.exp(score - first[:, None]), 0.0), axis=1)
    live = r < tokens
    tl.store(weights + r * 2, 1.0 / total, mask=live)
    tl.store(ids + r * 2, first_id, mask=live)
    if BUG == "second-slot":
        live = live & (second > -1e30)
    tl.store(weights + r * 2 + 1, tl.exp(second - first) / total, mask=live)
    tl.store(ids + r * 2 + 1, second_id, mask=live)


def gate(logits: Tensor, *, bug: str = "") -> tuple[Tensor, Tensor]:
    tokens, experts = logits.shape
    weights = torch.empty((tokens, 2), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, 2), dtype=torch.int32, device=logits.device)
    if tokens:
        gate_kernel[(triton.cdiv(tokens, 8),)](
            logits, weights, ids, tokens, experts, *logits.stride(),
            ROWS=8, BLOCK=triton.next_power_of_2(experts), BUG=bug,
        )  # fmt: skip
    return weights, ids


def make_spec(bug: str = "") -> FusionSpec:
    def fused(logits: Tensor) -> tuple[Tensor, Tensor]:
        return gate(logits, bug=bug)

    return FusionSpec(
        name=f"gate {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"logits": tensor("tokens experts")},
        dims={"tokens": dim(0, 64), "experts": dim(2, 64)},
    )
