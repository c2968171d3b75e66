"""Checks `inputs`, `bounds` and `unwritten`: wrong writes, and results that depend on foreign memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import torch

from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.verdict import ChangedInput, DamagedMemory, Verdict, WrongAccess, failed, passed
from pytest_fusion.run.fused import Outcome
from pytest_fusion.run.memory.damage import Change, Damage
from pytest_fusion.spec.fusion_spec import FusionSpec

_ZONES = {"before": "before the start of", "after": "past the end of", "between": "between the elements of"}


@dataclass(frozen=True, slots=True)
class Call:
    """A call that changed an input that the case's own call does not, in words; ``slug`` is part of identities."""

    slug: str
    who: str
    otherwise: str = "where nothing requires grad it changes none"


BACKWARD = Call("backward", "backward", "forward had changed none")
RECORDING = Call("forward", "forward, while it records a graph,")


def check_inputs(changes: Iterable[Change], allowed: Sequence[str], by: Callable[[str], Call] | None = None) -> Verdict:
    """No input changed in any bit, except those that the kernel may write; ``by`` names the call that changed each."""
    for change in changes:
        declared = change.name.partition("[")[0]
        if declared in allowed:
            continue
        identity, who = f"inputs:{change.name}", "the kernel"
        advice = f"declare mutates={declared!r} if that is a result, clobbers={declared!r} if it is scratch memory"
        call = by(change.name) if by is not None else None
        if call is not None:
            identity, who = f"{identity}:{call.slug}", call.who
            advice = (
                f"{call.otherwise}. Other operations may have saved it for their own backward: write into a copy, or "
                f"declare clobbers={declared!r} where callers give it up"
            )
        return failed(
            "inputs",
            f"{who} changed {change.count} element(s) of its input {change.name}, the first at "
            f"{list(change.first)}; {advice}",
            identity=identity,
            evidence=ChangedInput(change.name, change.count, list(change.first), call.slug if call else None),
        )
    return passed("inputs")


def check_damage(damage: Iterable[Damage]) -> Verdict:
    """Nothing was written outside a tensor's own elements."""
    for hurt in damage:
        where = f"{_ZONES[hurt.zone]} {hurt.name}"
        far = f"{hurt.elements}" if hurt.farthest == hurt.elements else f"{hurt.elements} to {hurt.farthest}"
        return failed(
            "bounds",
            f"the kernel wrote {where}, {far} element(s) away from its own: {hurt.count} byte(s) changed",
            identity=f"bounds:write:{hurt.zone}",
            evidence=DamagedMemory(hurt.name, hurt.zone, hurt.elements, hurt.farthest, hurt.count),
        )
    return passed("bounds")


def check_access(outcome: Outcome, spec: FusionSpec) -> Verdict | None:
    """The first wrong access that the interpreter saw, or ``None``."""
    # Reads of unwritten memory are left to the comparison of fills: a value that is read and dropped is no bug. Races
    # of plain loads and stores count even where results may vary; float atomics and locks do not cause them.
    for found in outcome.findings.found:
        check = "repeat" if found.kind in ("racing-stores", "racing-load") else "bounds"
        if found.kind == "unwritten-load" or check in spec.without:
            continue
        return failed(
            check,
            str(found),
            identity=f"{check}:{found.kind}:{found.kernel}:{found.line}",
            evidence=WrongAccess(found),
        )
    return None


def read_at(outcome: Outcome, *, scratch: bool) -> str:
    """The line that read unwritten memory, or an input's gaps, in words; empty where none was seen."""
    sites = (
        [(found.file, found.line, found.code) for found in outcome.findings.found if found.kind == "unwritten-load"]
        if scratch
        else [(site.file, site.line, site.code) for site in outcome.findings.gap_reads.values()]
    )
    if not sites:
        return ""
    file, line, code = sites[0]
    return f", read by `{code}` ({PurePath(file).name}:{line})"


def of_elements(check: str, output: str, mask: torch.Tensor, what: str, rest: str = "", *, slug: str) -> Verdict:
    """The failure of the elements in ``mask`` of an output; ``what`` they do wrong, in words, and the ``rest``."""
    seen = repeat.seen(output, mask)
    return failed(
        check,
        f"{seen} {what}, the first at {seen.first}{rest}",
        identity=f"{check}:{slug}",
        output=output,
        count=seen.count,
        total=seen.total,
        first=seen.first,
    )


def unwritten_mask(a: Outcome, b: Outcome, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    """Elements of an output that hold the fill of fresh memory in both runs; ``None`` where none can."""
    assert a.watch is not None
    assert b.watch is not None
    first, second = a.watch.unwritten(x), b.watch.unwritten(y)
    if first is None or second is None or first.shape != second.shape:
        return None
    return first & second


def check_unwritten(masks: Mapping[str, torch.Tensor | None]) -> Verdict:
    """Every element of every output was written."""
    for name, mask in masks.items():
        if mask is not None and bool(mask.any()):
            rest = ": they hold what torch.empty found in memory"
            return of_elements("unwritten", name, mask, "were never written", rest, slug=name)
    return passed("unwritten")
