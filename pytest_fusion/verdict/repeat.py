"""Check `repeat`: the same inputs give the same bits, and changed ones a changed answer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pytest_fusion.verdict.model import Verdict, failed, passed

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elements that differ in any bit; two NaN are equal whatever their payload."""
    if a.is_complex():
        a, b = (torch.view_as_real(t.resolve_conj().resolve_neg()) for t in (a, b))
        return differing(a, b).any(-1)
    word = _WORDS[a.element_size()]
    different = a.resolve_neg().contiguous().view(word) != b.resolve_neg().contiguous().view(word)
    if a.is_floating_point():
        x, y = (t.float() if t.element_size() == 1 else t for t in (a, b))  # torch has no isnan for some fp8 formats
        different &= ~(x.isnan() & y.isnan())
    return different


def first_difference(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> tuple[str, torch.Tensor] | None:
    """The first output that differs between two runs, with the mask of its differing elements."""
    for name, tensor in a.items():
        other = b.get(name)
        if other is None or other.shape != tensor.shape or other.dtype != tensor.dtype:
            return name, torch.ones(tensor.shape if tensor.numel() else (1,), dtype=torch.bool)
        mask = differing(tensor, other)
        if bool(mask.any()):
            return name, mask
    return None


def check_repeat(difference: tuple[str, torch.Tensor] | None, runs: int) -> Verdict:
    """``difference`` between two runs on equal inputs in equal surroundings."""
    if difference is None:
        return passed("repeat", runs=runs)
    name, mask = difference
    count = int(mask.sum())
    first = [int(i) for i in mask.nonzero()[0]]
    return failed(
        "repeat",
        f"{count} of {mask.numel()} element(s) of {name} differ between two runs on the same inputs, the first at "
        f"{first}; declare deterministic=False if that is meant",
        identity=f"repeat:{name}",
        output=name,
        count=count,
        total=mask.numel(),
        first=first,
    )
