"""Lanes of complex tensors: stored for real and imaginary parts, which share a storage, and computed as complex."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_store import Lanes
from pytest_fusion.oracle.rounding import Noise


def parts(tensor: Tensor) -> Tensor:
    """``tensor``, or the real and imaginary parts of a complex one along a last axis; a view of its memory."""
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)


def paired(lanes: Lanes, tensor: Tensor) -> Lanes:
    """The complex128 lanes of a complex ``tensor`` from those of its ``parts``."""

    def joined(value: Tensor) -> Tensor:
        made = torch.complex(value[..., 0].contiguous(), value[..., 1].contiguous())
        return made.conj().resolve_conj() if tensor.is_conj() else made

    return lanes.bare.each(joined)


def split(lanes: Lanes) -> Lanes:
    """Complex lanes as those of their parts; real ones unchanged."""
    return lanes.bare.each(lambda v: torch.view_as_real(v.resolve_conj())) if lanes.raw.is_complex() else lanes


def transforms(func: Any) -> bool:
    """Whether the operation is a Fourier transform, where each result sums a whole axis."""
    return func is not None and func._schema.name.startswith("aten::_fft_")


def largest_over(value: Tensor, func: Any, args: Sequence[Any]) -> Tensor:
    """What rounding errors of ``value`` ``(L, *shape)`` are relative to: its modulus; of a transform, the largest."""
    # A product's real part, or an element of a transform, may cancel while its terms do not.
    size = value[:1].abs()
    if not transforms(func) or not size.numel():
        return size
    dims = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    return size.amax([d % (value.dim() - 1) + 1 for d in dims], keepdim=True).expand_as(size)


def disturbed(noise: Noise, value: Tensor, size: Tensor, relative: float) -> Tensor:
    """Each lane's ``value``, or both parts of a complex one, off by up to ``relative * size``."""
    pairs = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    off = noise.relative(torch.ones_like(pairs[:1]), relative) - 1
    off = off * (size.unsqueeze(-1) if value.is_complex() else size)
    # Without a finite size there is no noise.
    pairs = pairs + torch.where(off.isfinite(), off, 0.0)
    return torch.view_as_complex(pairs.contiguous()) if value.is_complex() else pairs
