"""What the rope kernel has to compute, unfused."""

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
    turned = [_turned(x, cos.unsqueeze(-2).to(compute), sin.unsqueeze(-2).to(compute), layout) for x in (q, k)]
    return turned[0], turned[1]


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> torch.Tensor:
    """``x`` of ``(*batch, heads, dim)`` turned by angles that broadcast over the heads, in the dtype of ``cos``."""
    half = cos.shape[-1]
    turning, rest = x[..., : 2 * half].to(cos.dtype), x[..., 2 * half :]
    if layout == "half":
        a, b = turning[..., :half], turning[..., half:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)
