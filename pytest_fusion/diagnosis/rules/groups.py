"""The order of elements inside small groups, as nibbles of a byte and codes of a word are unpacked in."""

from __future__ import annotations

import torch

# Two halves of a byte, bytes of a word, codes of 4 bits in 32 and in 64.
_SIZES = (2, 4, 8, 16)
# Sixteen codes agree by chance in so many groups once in 4e9; fewer values than these, as signs, say little.
_GROUPS, _VALUES = 8, 3
_SAME = 2e-5
# Each element of a group is compared with each, so many groups are enough.
_MOST = 4096


def order_in_groups(got: torch.Tensor, right: torch.Tensor) -> list[int] | None:
    """Which element of its group of the last axis each place holds, in all groups the same; ``None`` if there is none.

    A result of codes has each of its values many times over, so that a single wrong element tells no place.
    """
    if not right.dim() or got.dtype == torch.bool or not bool(torch.isfinite(got).all()):
        return None
    precise = max(_SAME, 2 * torch.finfo(got.dtype).eps) if got.is_floating_point() else 0.0
    for size in _SIZES:
        if right.shape[-1] % size or right.numel() < size * _GROUPS:
            return None
        ours, theirs = (t.double().reshape(-1, size)[:_MOST] for t in (got, right))
        same = ((ours[:, :, None] - theirs[:, None, :]).abs() <= precise * theirs[:, None, :].abs()).all(0)
        order = [at if bool(same[at, at]) else _only(same[at]) for at in range(size)]
        if any(of != at for at, of in enumerate(order)) and all(
            of == at or (of is not None and _tells(theirs[:, at], theirs[:, of])) for at, of in enumerate(order)
        ):
            return [of for of in order if of is not None]
    return None


def _only(same: torch.Tensor) -> int | None:
    places = same.nonzero().flatten().tolist()
    return int(places[0]) if len(places) == 1 else None


def _tells(own: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one column in place of another is no coincidence."""
    return len(set(other.tolist())) >= _VALUES and int((own != other).sum()) >= _VALUES
