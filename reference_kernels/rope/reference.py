"""The unfused reference of rope."""

from __future__ import annotations

import torch


def rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str = "half",
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both ``q`` and ``k`` with their first dimensions turned in pairs, in ``compute``, rounded once to their dtype.

    ``q`` is ``(*batch, q_heads, dim)``, ``k`` ``(*batch, k_heads, dim)``; ``cos`` and ``sin`` broadcast to
    ``(*batch, half)``, one angle for each pair, so the first ``2 * half`` of ``dim`` turn and the others stay. A pair
    is ``(x[i], x[i + half])`` in layout ``"half"`` (GPT-NeoX, Llama) and ``(x[2 * i], x[2 * i + 1])`` in
    ``"interleaved"`` (GPT-J).
    """
    q_turned, q_rest = _turned(q, cos, sin, layout, compute)
    k_turned, k_rest = _turned(k, cos, sin, layout, compute)
    return torch.cat((q_turned.to(q.dtype), q_rest), -1), torch.cat((k_turned.to(k.dtype), k_rest), -1)


def rope_cache_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    layout: str = "half",
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    checked: bool = True,  # noqa: ARG001
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``q`` as `rope_reference` turns it; ``k`` turned and ``v`` as it is go into the caches, in place.

    ``v`` is like ``k``, the caches are ``(pages, page_size, k_heads, dim)``. A token's slot is a page times the size
    of one plus a row in it; a token whose slot the caches do not have goes nowhere. Keys are divided by ``k_scale`` and
    values by ``v_scale``, ``(k_heads,)``, and rounded once, to the caches' dtype; to float8 no further than its largest
    number. ``checked`` is the kernel's, and means nothing here.
    """
    q_turned, q_rest = _turned(q, cos, sin, layout, compute)
    k_turned, k_rest = _turned(k, cos, sin, layout, compute)
    pages, page_size = k_cache.shape[:2]
    kept = (slots >= 0) & (slots < pages * page_size)
    page, row = slots[kept].long() // max(page_size, 1), slots[kept].long() % max(page_size, 1)
    for cache, rows, scale in (
        (k_cache, torch.cat((k_turned, k_rest.to(compute)), -1), k_scale),
        (v_cache, v.to(compute), v_scale),
    ):
        scaled = rows[kept] if scale is None else rows[kept] / scale.to(compute)[:, None]
        if cache.dtype == torch.float8_e4m3fn:
            scaled = scaled.clamp(-448.0, 448.0)
        cache[page, row] = scaled.to(cache.dtype)
    return torch.cat((q_turned.to(q.dtype), q_rest), -1)


def _turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str, compute: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What turns of ``x``, ``(*batch, heads, dim)``, in ``compute``, and the rest of it; one angle for all heads."""
    half = cos.shape[-1]
    cos, sin = (angle.unsqueeze(-2).to(compute) for angle in (cos, sin))
    turning, rest = x[..., : 2 * half].to(compute), x[..., 2 * half :]
    if layout == "half":
        a, b = turning[..., :half], turning[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1), rest
    a, b = turning[..., 0::2], turning[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2), rest
