"""Causes in equal values: ties that are broken otherwise, and updates of one place of which all but one are lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pytest_fusion.case import numbers
from pytest_fusion.case.model import Case
from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Lab
from pytest_fusion.diagnosis.model import Found

# Of the largest element, from the first to the last: ties of few values are broken, and what is larger stays so mostly.
_SPREAD = 2.0**-4
_TELLING = 2
# Of more numbers than this some are equal by chance, and finding out takes as long as all other rules.
_MOST = 1 << 14


def equals(lab: Lab) -> Found | None:
    """Wrong where an input holds one number twice, for several seeds, and right where all its numbers differ."""
    asked: list[str] = []
    for case in _sizes(lab):
        # What fails of unequal numbers, once, is no matter of equal ones.
        if not _repeating(lab, [case]) and lab.ask(case).wrong:
            continue
        cases = lab.telling(case)
        if len(cases) < _TELLING:
            continue
        for name in _repeating(lab, cases):
            whole = _is_whole(lab, cases[0], name)
            unlike = _distinct(name) if whole else _spread(name)
            # Numbers that are moved apart are no longer tiny, nor 0: so must be those that stay equal.
            alike = (_one(name),) if whole else (edits.larger([name]), _raised(name))
            if not all(lab.ask(each, edit=edit).wrong for each in cases for edit in alike):
                continue
            asked.append(name)
            if all(lab.ask(each, edit=unlike).right for each in cases) and lab.always_right(case, edit=unlike):
                how = "all are the same" if whole else "all are 3 % larger, or by 1/32 of the largest"
                return Found("equal-values", [f"right once no two numbers of {name} are equal, wrong where {how}"])
    if asked:
        lab.ruled_out.append(f"equal values of {', '.join(dict.fromkeys(asked))}: wrong where all differ too")
    return None


def _sizes(lab: Lab) -> Iterator[Case]:
    """The case, and some with one dim longer: indices can only differ where there are as many places."""
    sizes = ((), (5, 7, 3, 4, 6), (12, 5, 4, 6), (5, 12, 4, 6), (4, 5, 12, 6))
    yield from {
        case.key(): case for case in (lab.grown(None, least) if least else lab.base for least in sizes)
    }.values()


def _repeating(lab: Lab, cases: Sequence[Case]) -> list[str]:
    """The inputs that hold a number twice in each case, and, if indices, no more than there are places for."""
    found: list[set[str]] = []
    for case in cases:
        probe = lab.ask(case).probe
        tensors = probe.logical if probe is not None else {}
        found.append({n for n, t in tensors.items() if isinstance(t, torch.Tensor) and _repeats(t)})
    names = set.intersection(*found) if found else set()
    return sorted(names)


def _repeats(t: torch.Tensor) -> bool:
    if t.dtype is torch.bool or t.dtype.is_complex or t.element_size() == 1 or not 2 <= t.numel() <= _MOST:
        return False
    if not t.dtype.is_floating_point:
        room = int(t.max()) - int(t.min()) + 1
        return bool((t >= 0).all()) and len(set(t.flatten().tolist())) < t.numel() <= room
    return any(len(set(row)) < len(row) for row in t.reshape(-1, t.shape[-1]).tolist())


def _is_whole(lab: Lab, case: Case, name: str) -> bool:
    probe = lab.ask(case).probe
    return probe is not None and not probe.logical[name].dtype.is_floating_point


def _distinct(name: str) -> Edit:
    """Indices of which none is used twice: those that were stay where they were first, and others come in their places.

    A kernel that forgets the last bin is wrong wherever that is met, once or twice.
    """

    def apply(logical: dict[str, Any]) -> dict[str, Any]:
        t = logical[name]
        used = t.flatten().tolist()
        others = sorted(
            set(range(min(used), max(used) + 1)) - set(used), key=lambda i: numbers.mix(len(used), "distinct", i)
        )
        order: list[int] = []
        seen: set[int] = set()
        for index in used:
            order.append(others.pop() if index in seen else index)
            seen.add(index)
        return {**logical, name: torch.tensor(order, dtype=t.dtype, device=t.device).reshape(t.shape)}

    return Edit(f"no two of {name} alike", apply)


def _one(name: str) -> Edit:
    """The first index everywhere."""
    return Edit(f"the first of {name} everywhere", lambda logical: {**logical, name: _filled(logical[name])})


def _filled(t: torch.Tensor) -> torch.Tensor:
    return torch.full_like(t, int(t.flatten()[0]))


def _largest(t: torch.Tensor) -> float:
    return float(t.abs().nan_to_num(0, 0, 0).max() or 1.0)


def _raised(name: str) -> Edit:
    """All numbers larger by what `_spread` adds to them on average."""
    return edits.on([name], "1/32 of the largest more", lambda t: t + _SPREAD / 2 * _largest(t))


def _spread(name: str) -> Edit:
    """Numbers that are equal apart from each other, by less than unequal ones mostly are."""

    def function(t: torch.Tensor) -> torch.Tensor:
        step = _SPREAD * _largest(t) / max(t.numel(), 1)
        order = sorted(range(t.numel()), key=lambda i: numbers.mix(t.numel(), "spread", i))
        return t + step * torch.tensor(order, dtype=t.dtype, device=t.device).reshape(t.shape)

    return edits.on([name], "no two alike", function)
