"""Exact facts: the direction in which each is worse, and the comparison of two values.

A fact's name has parts between ``/`` (target, kernel, fact) and words between ``.``: ``"launches.kernels"``,
``"sm_90/softmax_kernel/spills"``, ``"memory.peak"``. The first word is its group, measured or left out together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

# Compilations over all entries but each kernel's first; their row also has the reasons.
RECOMPILES = "recompiles"
FactStatus = Literal["regressed", "improved", "changed", "same", "unknown"]

# Words in the last part of a fact. More of these is worse:
_MORE_IS_WORSE = frozenset(
    "launches recompiles recompilations compilations graphs spills local shared bytes memory workspace retained syncs "
    "allocations".split()
)
# Less of these is worse. Instructions have no direction: a compiler may go from HMMA to WGMMA, or from loads to TMA.
_LESS_IS_WORSE = frozenset("occupancy tensor_core tensor_cores saved".split())
# Registers, FLOPs and warps have no direction: registers cost when they lower occupancy or spill, which are facts too.


@dataclass(frozen=True, slots=True)
class Change:
    """One fact before and now; ``None`` is a side that does not have it."""

    fact: str
    before: int | None
    now: int | None
    verdict: FactStatus
    reason: str = ""


def group(fact: str) -> str:
    """The group of a fact: ``"sm_90"`` of ``"sm_90/kernel/spills"``, ``"launches"`` of ``"launches.kernels"``."""
    return re.split(r"[/.]", fact, maxsplit=1)[0]


def direction(fact: str) -> int:
    """1 where more is worse, -1 where less is worse, 0 where neither is known."""
    words = _words(fact)
    if "reference" in words:
        return 0
    if words & _LESS_IS_WORSE:
        return -1
    return 1 if words & _MORE_IS_WORSE else 0


def affects_speed(fact: str) -> bool:
    """Whether a fact has a direction or counts registers. Reports show counts of instructions after these."""
    return direction(fact) != 0 or "registers" in _words(fact)


def compare_facts(
    before: Mapping[str, int],
    now: Mapping[str, int],
    *,
    judged: bool = True,
    methods: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {}),
    context: str = "",
) -> list[Change]:
    """All facts of both sides, the worst first, then by name. Without ``judged`` (a reference) more launches are
    changed, not regressed. A fact of one side only is unknown: one change for a whole group that was not measured (no
    ``--fusion-targets``), else one for each fact. ``methods`` are of before and now; ``context`` ends each reason."""
    measured = {group(fact) for fact in now}
    known = {group(fact) for fact in before}
    changes = [_one_sided(name, before, now) for name in sorted(measured ^ known)]
    both = measured & known
    changes += [_compare(fact, before, now, methods) for fact in {*before, *now} if group(fact) in both]
    changes = [_in_context(change, judged, context) for change in changes]
    return sorted(changes, key=lambda change: (_RANK[change.verdict], change.fact))


def compare_names(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """The kernels that are launched more or less often than before; empty if there are none."""
    more, fewer = Counter(now) - Counter(before), Counter(before) - Counter(now)
    parts = [
        f"{word} {', '.join(name if count == 1 else f'{count} x {name}' for name, count in sorted(kernels.items()))}"
        for word, kernels in (("more", more), ("fewer", fewer))
        if kernels
    ]
    return "; ".join(parts)


def compare_reasons(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """The reasons to compile again that came and went, whatever their counts; empty if there are none."""
    came, went = ([reason for reason in one if reason not in other] for one, other in ((now, before), (before, now)))
    return f"{', '.join(sorted(went)) or 'none'} -> {', '.join(sorted(came)) or 'none'}" if came or went else ""


_RANK: dict[FactStatus, int] = {"regressed": 0, "unknown": 1, "changed": 2, "improved": 3, "same": 4}


def _in_context(change: Change, judged: bool, context: str) -> Change:
    if change.verdict == "same":
        return change
    if not judged and change.verdict in ("regressed", "improved"):
        change = replace(change, verdict="changed", reason="what the kernel is compared with changed")
    return replace(change, reason=change.reason + context)


def _one_sided(name: str, before: Mapping[str, int], now: Mapping[str, int]) -> Change:
    count = sum(group(fact) == name for fact in (*before, *now))
    facts = "one fact" if count == 1 else f"{count} facts"
    if any(group(fact) == name for fact in now):
        return Change(name, None, None, "unknown", f"the baseline lacks {facts}; add with --fusion-update new")
    return Change(name, None, None, "unknown", f"this run did not measure {facts} of the baseline")


def _compare(
    fact: str, before: Mapping[str, int], now: Mapping[str, int], methods: tuple[Mapping[str, str], Mapping[str, str]]
) -> Change:
    was, is_ = before.get(fact), now.get(fact)
    if was is None:
        return Change(fact, was, is_, "unknown", "the baseline lacks it; add it with --fusion-update new")
    if is_ is None:
        return Change(fact, was, is_, "unknown", "this run did not find it; accept that with --fusion-update all")
    theirs, ours = (method.get(group(fact)) for method in methods)
    if theirs != ours:
        return Change(fact, was, is_, "unknown", f"counted by {theirs or 'an unknown method'} then, by {ours} now")
    if was == is_:
        return Change(fact, was, is_, "same")
    towards = direction(fact)
    if towards == 0:
        return Change(fact, was, is_, "changed", "neither better nor worse in itself")
    if (is_ > was) != (towards > 0):
        return Change(fact, was, is_, "improved")
    return _worse(fact, was, is_, before, now)


def _worse(fact: str, was: int, is_: int, before: Mapping[str, int], now: Mapping[str, int]) -> Change:
    """A fact that became worse. Shared memory costs nothing until fewer blocks fit on a multiprocessor."""
    of_kernel = (name for name in before if name.rpartition("/")[0] == fact.rpartition("/")[0])
    fits = next((name for name in of_kernel if "occupancy" in _words(name)), None)
    if "shared" in _words(fact) and fits is not None and now.get(fits, -1) >= before[fits]:
        return Change(fact, was, is_, "changed", "as many warps fit on a multiprocessor as before")
    if was == 0:
        return Change(fact, was, is_, "regressed", "there was none")
    return Change(fact, was, is_, "regressed", f"{(is_ - was) / was:+.0%}")


def _words(fact: str) -> set[str]:
    """The words of a fact, whole and in parts: ``"sm_90/k/local_bytes"`` is local_bytes, local and bytes."""
    return {word for part in fact.rpartition("/")[2].lower().split(".") for word in (part, *part.split("_"))}


def with_unmeasured(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """``now`` with the groups of ``before`` that this run did not measure."""
    measured = {group(fact) for fact in now}
    return {**{fact: value for fact, value in before.items() if group(fact) not in measured}, **now}
