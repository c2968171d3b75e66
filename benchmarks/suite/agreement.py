"""Whether two results are roughly the same: a time of something else is worth nothing, the proof is the plugin's."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# Of a tensor's norm: bfloat16 in another order of rounding is within 1 %, another function is not.
ROUGHLY = 0.03
# Of a gradient's: where eager rounds half way, one relu in three hundred is open that is shut elsewhere, which is 6 %.
ROUGHLY_GRADIENTS = 0.12
# Of whole numbers, and of float8 codes: neighbours of what rounds at a tie.
_UNEQUAL = 0.02
_MOST = 1 << 20


def apart(found: Any, wanted: Any, roughly: float = ROUGHLY) -> str:
    """What two results differ in, "" where they agree to ``roughly`` of a tensor's norm; of large tensors a million
    elements are compared."""
    ours, theirs = ([leaf for leaf in tree_leaves(each) if isinstance(leaf, torch.Tensor)] for each in (found, wanted))
    if len(ours) != len(theirs):
        return f"it returns {len(ours)} tensors instead of {len(theirs)}"
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine.shape != other.shape:
            return f"result {number} has shape {tuple(mine.shape)} instead of {tuple(other.shape)}"
        if why := _differs(_some(mine), _some(other), mine.is_floating_point() and mine.element_size() > 1, roughly):
            return f"result {number} {why}"
    return ""


def _some(t: torch.Tensor) -> torch.Tensor:
    flat = t.detach().reshape(-1)
    # An odd step does not follow the columns.
    step = max(1, flat.numel() // _MOST) | 1 if flat.numel() > _MOST else 1
    return flat[::step].to(torch.float64)


def _differs(found: torch.Tensor, wanted: torch.Tensor, continuous: bool, roughly: float) -> str:
    if found.numel() == 0:
        return ""
    strange = found.isfinite() != wanted.isfinite()
    if bool(strange.any()):
        return f"is not finite where the other is, at {int(strange.sum())} of {found.numel()} elements"
    both = found.isfinite()
    found, wanted = found[both], wanted[both]
    if not continuous:
        unequal = float((found != wanted).double().mean()) if found.numel() else 0.0
        return f"differs at {unequal:.1%} of the elements" if unequal > _UNEQUAL else ""
    away = float((found - wanted).norm() / wanted.norm().clamp_min(1e-30)) if found.numel() else 0.0
    return f"is {away:.3g} of its norm away" if away > roughly else ""
