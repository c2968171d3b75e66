"""Causes in equal values: ties that are broken otherwise, and updates of one place of which all but one are lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pytest_fusion.case import counter_random
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.make import ImpossibleCase
from pytest_fusion.diagnosis import edits
from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.edits import Edit
from pytest_fusion.diagnosis.experiments import Lab

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
            answers = [lab.ask(each, edit=unlike) for each in cases]
            asked += [name] if any(answer.wrong for answer in answers) else []
            if all(answer.right for answer in answers) and lab.always_right(case, edit=unlike):
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
            set(range(min(used), max(used) + 1)) - set(used), key=lambda i: counter_random.mix(len(used), "distinct", i)
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
        order = sorted(range(t.numel()), key=lambda i: counter_random.mix(t.numel(), "spread", i))
        return t + step * torch.tensor(order, dtype=t.dtype, device=t.device).reshape(t.shape)

    stepped = edits.on([name], "steps", function)

    def apply(logical: dict[str, Any]) -> dict[str, Any]:
        return {**logical, name: _apart(stepped.apply(logical)[name], 2 * _largest(logical[name]))}

    return Edit(f"no two of {name} alike", apply)


def _apart(t: torch.Tensor, most: float) -> torch.Tensor:
    """Finite numbers that are still equal in their dtype one unit in the last place from each other, in their order.

    Steps of less than such a unit leave ties: bfloat16 has 128 numbers between the largest and its half. Raises
    ``ImpossibleCase`` where there are too few numbers up to ``most`` in size.
    """
    flat = t.flatten()
    chosen = torch.isfinite(flat)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    bits, least = flat[chosen].view(whole).long(), torch.iinfo(whole).min
    # Numbers in a row, 0 and -0 the same: the bits of those below 0 count from the least integer on.
    place, order = torch.where(bits < 0, least - bits, bits).sort(stable=True)
    rank = torch.arange(len(place), device=t.device)
    place = (place - rank).cummax(0).values + rank
    bits[order] = torch.where(place < 0, least - place, place)
    made = flat.clone()
    made[chosen] = bits.to(whole).view(t.dtype)
    if bool((made[chosen].double().abs() > most).any()):
        raise ImpossibleCase(f"{t.numel()} numbers of {t.dtype} cannot all differ up to {most:g}")
    return made.reshape(t.shape)
