"""The unfused reference of flash_attention."""

from __future__ import annotations

import itertools

import torch


def flash_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    offsets: torch.Tensor | None = None,
    k_offsets: torch.Tensor | None = None,
    checked: bool = True,  # noqa: ARG001
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale * q @ k.T) @ v`` by head in ``compute``, rounded to ``q``'s dtype, and the softmax's log-sum-exp
    (natural, in ``compute``). The weights are rounded to that dtype too before they meet ``v``, as in the eager
    attention of transformers.

    ``q`` is ``(batch, queries, heads, features)``, ``k`` and ``v`` ``(batch, keys, kv_heads, features)``; head ``h`` of
    ``q`` reads head ``h // (heads // kv_heads)`` of the others. The result has ``q``'s shape, the log-sum-exp is
    ``(batch, heads, queries)``. With ``offsets`` the sequences are packed: ``q`` is ``(total, heads, features)``,
    sequence ``i`` its rows from ``offsets[i]`` to ``offsets[i + 1]``, those of ``k`` and ``v`` by ``k_offsets`` (the
    same if absent), and the log-sum-exp is ``(heads, total)``.

    The last query stands at the last key: query ``i`` is at position ``i + keys - queries``. A ``causal`` one sees keys
    up to its position; with ``window`` it sees those at a distance below ``window``. A query that sees no key gives 0
    and ``-inf``, and has no gradient. ``checked`` is the kernel's, and means nothing here.
    """
    if offsets is None:
        return _attention(q, k, v, causal, window, scale, compute)
    if k_offsets is None:
        k_offsets = offsets
    out, lse = [], []
    bounds = (itertools.pairwise(each.tolist()) for each in (offsets, k_offsets))
    for (begin, end), (k_begin, k_end) in zip(*bounds, strict=True):
        parts = q[None, begin:end], k[None, k_begin:k_end], v[None, k_begin:k_end]
        mixed, sums = _attention(*parts, causal, window, scale, compute)
        out.append(mixed[0])
        lse.append(sums[0])
    return torch.cat(out), torch.cat(lse, 1)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int | None,
    scale: float | None,
    compute: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, kv_heads = q.shape[2], k.shape[2]
    queries, keys, values = (each.to(compute).transpose(1, 2) for each in (q, k, v))
    if kv_heads:
        keys, values = (each.repeat_interleave(heads // kv_heads, 1) for each in (keys, values))
    scores = queries @ keys.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    position = torch.arange(q.shape[1], device=q.device)[:, None] + (k.shape[1] - q.shape[1])
    key = torch.arange(k.shape[1], device=q.device)[None, :]
    seen = torch.ones_like(position + key, dtype=torch.bool)
    if causal:
        seen = seen & (key <= position)
    if window is not None:
        seen = seen & ((key - position).abs() < window)
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.softmax(scores, -1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return (weights.to(v.dtype).to(compute) @ values).transpose(1, 2).to(q.dtype), lse
