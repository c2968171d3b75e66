"""The unfused reference of decode_attention."""

from __future__ import annotations

import torch


def decode_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    checked: bool = True,  # noqa: ARG001
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale * q @ k.T) @ v`` by head in ``compute``, rounded to ``q``'s dtype, and the softmax's log-sum-exp
    (natural, in ``compute``). The weights are rounded to ``q``'s dtype too before they meet ``v``, as in the eager
    attention of transformers.

    ``q`` is ``(batch, heads, features)``, one query a sequence; its last key is number ``lengths[i] - 1``, and with
    ``window`` it sees the last ``window`` keys. The caches are ``(batch, capacity, kv_heads, features)``; with
    ``page_table`` ``(batch, most)`` they are ``(pages, page_size, kv_heads, features)``, and key ``j`` of sequence
    ``i`` lies in page ``page_table[i, j // page_size]``. Head ``h`` of ``q`` reads head ``h // (heads // kv_heads)``.
    What the caches and the table hold besides is not read, NaN and pages that do not exist included. Keys are times
    ``k_scale``, values times ``v_scale``, ``(kv_heads,)``. A sequence of no keys gives 0 and ``-inf``. ``checked`` is
    the kernel's, and means nothing here.
    """
    batch, heads, features = q.shape
    if page_table is not None:
        k_cache, v_cache = (_gathered(cache, page_table) for cache in (k_cache, v_cache))
    capacity, kv_heads = k_cache.shape[1:3]
    key = torch.arange(capacity, device=q.device)
    seen = key < lengths[:, None]
    if window is not None:
        seen = seen & (key >= lengths[:, None] - window)
    keys = k_cache.to(compute).masked_fill(~seen[:, :, None, None], 0.0).permute(0, 2, 3, 1)
    values = v_cache.to(compute).masked_fill(~seen[:, :, None, None], 0.0).transpose(1, 2)
    if k_scale is not None:
        keys = keys * k_scale.to(compute)[:, None, None]
    queries = q.to(compute).reshape(batch, kv_heads, heads // max(kv_heads, 1), features)
    scores = queries @ keys * (features**-0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen[:, None, None, :], float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.softmax(scores, -1).masked_fill(~seen.any(-1)[:, None, None, None], 0.0)
    out = weights.to(q.dtype).to(compute) @ values
    if v_scale is not None:
        out = out * v_scale.to(compute)[:, None, None]
    return out.reshape(q.shape).to(q.dtype), lse.reshape(batch, heads)


def _gathered(cache: torch.Tensor, page_table: torch.Tensor) -> torch.Tensor:
    """Every sequence's pages in a row, ``(batch, most * page_size, kv_heads, features)``; page 0 for none."""
    pages, size, kv_heads, features = cache.shape
    batch, most = page_table.shape
    if pages == 0:
        return cache.new_zeros((batch, most * size, kv_heads, features))
    known = (page_table >= 0) & (page_table < pages)
    found = cache[torch.where(known, page_table, 0).long()]
    return found.reshape(batch, most * size, kv_heads, features)
