"""The cause in what masked-off lanes of loads hold: nothing defined without ``other``, or what ``other`` gives them."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_fusion import interpreter
from pytest_fusion.case.case_model import Case
from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.experiments import Answer, Lab
from pytest_fusion.interpreter.memory.memory_findings import Site
from pytest_fusion.interpreter.memory.transfers import repeated_lanes
from pytest_fusion.interpreter.memory.undefined_lanes import masked_fill

# Lines are asked one by one, which of them reaches the result.
_MOST_LINES = 8


def lanes(lab: Lab) -> Found | None:
    """Right for every seed once those lanes hold zero, which a GPU need not put there."""
    if lab.context.device.type != "cpu" or not interpreter.installed():
        return None
    guilty: dict[Site, None] = {}
    for seed in lab.seeds():
        case = lab.base.with_(seed=seed)
        if not lab.ask(case).wrong:
            continue
        with masked_fill("zero") as met:
            answer = lab.once(case)
        if not met or not answer.right:
            return None
        guilty = guilty or _reaching(lab, case, list(met)[:_MOST_LINES])
    if not guilty:
        return None
    named = "; ".join(f"line {site.line} of {site.kernel}, `{site.code}`" for site in guilty)
    reach = f"Triton leaves them undefined, and they reach the result ({named})"
    past = "today's NVIDIA code happens to put 0 there; give other=, or look past it with --fusion-undefined zero"
    return Found("wrong-neutral-element", [f"right once masked lanes of loads without other= hold 0: {reach}", past])


def _reaching(lab: Lab, case: Case, lines: Iterable[Site]) -> dict[Site, None]:
    """Which lines make the result wrong by themselves; all, where it takes several."""
    alone: dict[Site, None] = {}
    for line in lines:
        with masked_fill("zero", poisoned=line):
            if lab.once(case).wrong:
                alone[line] = None
    return alone or dict.fromkeys(lines)


def padded(lab: Lab) -> Found | None:
    """Right for every seed once the masked lanes of one load repeat an element that it keeps, and not ``other``.

    A 0 there may be far above all that the load keeps: exp(0 - -100) is infinite, and times a masked factor of 0 it is
    NaN. No dim of mamba-ssm 2.0.4's _chunk_scan_bwd_dx has a whole tile that is right, so tiles tell nothing of it.
    """
    if lab.context.device.type != "cpu" or not interpreter.installed():
        return None
    answer, lines = _repeated(lab, lab.base)
    if not answer.wrong:
        return None
    for line in lines[:_MOST_LINES]:
        if _cured(lab, line):
            given = f"line {line.line} of {line.kernel}, `{line.code}`"
            said = "right once masked lanes of one load repeat the last element that it keeps, in place of other="
            return Found("wrong-neutral-element", [f"{said}: {given}"])
    if lines:
        lab.ruled_out.append("padding: wrong too where the masked lanes of a load repeat an element that it keeps")
    return None


def _repeated(lab: Lab, case: Case, line: Site | None = None) -> tuple[Answer, list[Site]]:
    with repeated_lanes(line) as met:
        answer = lab.once(case)
    return answer, list(met)


def _cured(lab: Lab, line: Site) -> bool:
    """Right there for every seed that is wrong otherwise; of a single element a copy may be right by luck."""
    if not _repeated(lab, lab.base, line)[0].right:
        return False
    for base in (lab.base, lab.grown()):
        wrong = [case for seed in lab.seeds(base) if lab.ask(case := base.with_(seed=seed)).wrong]
        if not wrong or not all(_repeated(lab, case, line)[0].right for case in wrong):
            return False
    return True
