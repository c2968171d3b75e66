"""The unfused reference of dequant_matmul: the weight in full, then the product."""

from __future__ import annotations

import torch

from reference_kernels.dequant_matmul.codes import unpack_int4


def int8_linear_reference(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """``x @ (codes * scales).T`` in ``compute``, rounded once to ``x``'s dtype: ``codes`` int8 ``(n, k)``, ``scales``
    ``(n,)``."""
    weight = codes.to(compute) * scales.to(compute)[:, None]
    return (x.to(compute) @ weight.t()).to(x.dtype)


def int4_linear_reference(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    group: int = 128,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """As `int8_linear_reference` with codes of `pack_int4`, and ``scales`` ``(n, ceil(k / group))``."""
    k = x.shape[-1]
    columns = scales.to(compute).repeat_interleave(group, 1)[:, :k]
    weight = unpack_int4(packed, k, group).to(compute) * columns
    return (x.to(compute) @ weight.t()).to(x.dtype)


def fp8_linear_reference(
    x: torch.Tensor,
    codes: torch.Tensor,
    x_scales: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``(x * x_scales) @ (codes * scales).T`` in ``compute``, rounded once to ``dtype``: ``x`` and ``codes`` are
    float8_e4m3fn ``(*batch, k)`` and ``(n, k)``, ``x_scales`` ``(*batch, 1)`` or 0-d, ``scales`` ``(n,)`` or 0-d."""
    weight = codes.to(compute) * scales.to(compute).reshape(-1, 1)
    return ((x.to(compute) * x_scales.to(compute)) @ weight.t()).to(dtype)
