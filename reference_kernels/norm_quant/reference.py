"""The unfused reference of norm_quant: normalise, find each scale, quantise."""

from __future__ import annotations

import torch
import torch.nn.functional as F

LIMITS = {"fp8": 448.0, "int8": 127.0}
FLOOR = 1e-10  # of the largest magnitude, so that a row of zeros has a scale above 0 (as SGLang's and vLLM's groups)


def norm_quant_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm: str = "rms",
    codes: str = "fp8",
    group: int | None = None,
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(codes, scales)`` of the normalised ``x``, ``(*batch, n)``; all in ``compute``, rounded to codes alone.

    ``norm`` is ``"rms"`` or ``"layer"``; ``weight`` and ``bias`` are ``(n,)``. ``codes`` is ``"fp8"`` (float8_e4m3fn)
    or ``"int8"`` (-127 to 127), of ``x``'s shape. Each ``group`` of columns has a scale, or each row where it is
    ``None``: float32, ``(*batch, ceil(n / group))`` or ``(*batch, 1)``, so that ``codes * scales`` is the result.
    """
    wide = x.to(compute)
    if norm == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(compute)
    if bias is not None:
        normalised = normalised + bias.to(compute)
    return _quantised(normalised, codes, group)


def add_norm_quant_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm: str = "rms",
    codes: str = "fp8",
    group: int | None = None,
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`norm_quant_reference` of ``x + residual``, rounded to ``x``'s dtype, and that sum as a third result."""
    summed = (x.to(compute) + residual.to(compute)).to(x.dtype)
    return *norm_quant_reference(summed, weight, bias, eps, norm, codes, group, compute), summed


def _quantised(y: torch.Tensor, codes: str, group: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A group with NaN or infinity has the scale NaN and codes NaN, which int8 writes as 0."""
    width, limit = y.shape[-1], LIMITS[codes]
    size = group or max(width, 1)
    groups = -(-width // size) if group else 1
    parts = F.pad(y, (0, groups * size - width)).reshape(*y.shape[:-1], groups, size)
    largest = parts.abs().amax(-1).clamp_min(FLOOR)
    scales = torch.where(largest < torch.inf, largest, torch.nan) / limit
    scaled = (parts / scales[..., None]).flatten(-2)[..., :width]
    if codes == "int8":
        whole = torch.nan_to_num(scaled, nan=0.0).round().clamp(-limit, limit).to(torch.int8)
        return whole, scales.float()
    return scaled.clamp(-limit, limit).to(torch.float8_e4m3fn), scales.float()
