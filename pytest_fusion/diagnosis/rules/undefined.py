"""The cause in what masked-off lanes of loads hold: nothing defined without ``other``, or what ``other`` gives them."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_fusion import interpreter
from pytest_fusion.case.case_model import Case
from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.experiments import Lab
from pytest_fusion.interpreter.memory.memory_findings import Site
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
        if not lab.attempt(case).wrong:
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
