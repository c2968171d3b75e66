"""The formats of the codes, and how weights become them: plain torch, done once for a model."""

from __future__ import annotations

import torch

GROUPS = (64, 128)  # columns that share a scale and are packed together, a quarter of them at least 16 for tl.dot
FP8 = torch.float8_e4m3fn


def pack_int4(codes: torch.Tensor, group: int = 128) -> torch.Tensor:
    """int8 codes ``(n, k)`` from -8 to 7 as int16 ``(n, ceil(k / group) * group // 4)``, four a word.

    Word ``i`` of a group holds columns ``i``, ``i + group // 4``, ``i + group // 2`` and ``i + 3 * group // 4`` of it,
    from the low bits up, each plus 8: what neighbouring words hold in the same place are neighbouring columns, which a
    product takes as they come. A last group that is not full is filled up with codes of 0. Raises `ValueError` for
    codes out of range.
    """
    if codes.numel() and not bool(((codes >= -8) & (codes <= 7)).all()):
        raise ValueError(f"pack_int4: codes from {int(codes.min())} to {int(codes.max())}, allowed: -8 to 7")
    n, k = codes.shape
    groups = -(-k // group)
    whole = torch.nn.functional.pad(codes, (0, groups * group - k)).view(n, groups, 4, group // 4)
    first, second, third, fourth = (whole.to(torch.int32) + 8).unbind(2)
    words = first | (second << 4) | (third << 8) | (fourth << 12)
    return words.to(torch.int16).reshape(n, groups * group // 4)


def unpack_int4(packed: torch.Tensor, k: int, group: int = 128) -> torch.Tensor:
    """The int8 codes ``(n, k)`` of `pack_int4`."""
    n, size = packed.shape
    words = packed.reshape(n, 4 * size // group, group // 4)
    codes = torch.stack([(words >> place) & 15 for place in (0, 4, 8, 12)], 2).to(torch.int8) - 8
    return codes.reshape(n, 4 * size)[:, :k]


def quantise_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes of ``weight`` ``(n, k)`` and a float32 scale for each of its ``n`` rows."""
    scales = (_largest(weight) / 127).squeeze(1)
    return (weight.float() / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def quantise_int4(weight: torch.Tensor, group: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes of ``weight`` ``(n, k)``, and float32 scales ``(n, ceil(k / group))``, of a row's groups."""
    n, k = weight.shape
    groups = -(-k // group)
    parts = torch.nn.functional.pad(weight.float(), (0, groups * group - k)).view(n, groups, group)
    scales = _largest(parts) / 7
    codes = (parts / scales).round().clamp(-8, 7).to(torch.int8).view(n, groups * group)
    return pack_int4(codes, group), scales.squeeze(2)


def quantise_fp8(x: torch.Tensor, by_row: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn codes of ``x`` ``(*batch, k)`` and its float32 scales: ``(*batch, 1)``, or one, 0-d."""
    scales = (_largest(x) if by_row else _largest(x.reshape(1, -1)).reshape(())) / 448
    return (x.float() / scales).clamp(-448, 448).to(FP8), scales


def _largest(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude along the last dimension, which stays; never 0, which is no scale."""
    if x.shape[-1] == 0:
        return x.new_full((*x.shape[:-1], 1), 1.0, dtype=torch.float32)
    return x.float().abs().amax(-1, keepdim=True).clamp_min(1e-10)
