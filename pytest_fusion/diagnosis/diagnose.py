"""Finds the cause of a failure on its smallest case: rules run experiments, in order, until one is sure."""

from __future__ import annotations

from collections.abc import Callable

from pytest_fusion.checks.verdict import DamagedMemory, WrongAccess, WrongGradient
from pytest_fusion.diagnosis.causes import likely_cause
from pytest_fusion.diagnosis.diagnosis_model import Diagnosis
from pytest_fusion.diagnosis.experiments import Found, Lab
from pytest_fusion.diagnosis.rules import (
    epsilons,
    extents,
    indices,
    neutral,
    numerics,
    roundings,
    sources,
    strides,
    tuning,
    uneven,
    wrong_slice,
)

UNEXPLAINED = "unexplained"
# Two constants that differ by less count as one: in 16 bits each element has its own error of some 2^-8.
_ONE_FACTOR = 0.02

# Causes that single cases show, given the right values, sizes or layout of the upstream gradient.
_SHOWN = frozenset({"gradient-layout", "lost-output-gradient", "racing-load", "racing-stores"})

Rule = Callable[[Lab], Found | None]


def shown(lab: Lab) -> Found | None:
    """A check's own cause at other seeds or sizes: equal stores are no race, a softmax over one key has no gradient."""
    for case in (lab.base, lab.grown()):
        probes = [lab.attempt(each).probe for each in lab.telling(case)]
        failures = [found.failure for found in probes if found is not None and found.failure is not None]
        seen = [(cause, one) for one in failures if (cause := likely_cause(one)) in _SHOWN]
        if len(seen) > 1 and len({cause for cause, _ in seen}) == 1:
            cause, one = seen[0]
            return Found(cause, [f"in {len(seen)} of {len(failures)} other cases: {one.because or one.reason}"])
    return None


# Order matters: rules of layouts and empty dims first, those of precision before those of sizes.
_OF_VALUES: tuple[Rule, ...] = (
    tuning.config,
    extents.zero,
    strides.layout,
    indices.cached,
    numerics.special,
    numerics.overflow,
    roundings.rounding,
    epsilons.epsilon,
    uneven.capacity,
    uneven.kind,
    extents.tail,
    indices.misread,
    sources.elsewhere,
    extents.limit,
    indices.mixed,
    roundings.digits,
    wrong_slice.indifferent,
    sources.beyond,
    shown,
    neutral.curing,
)
_OF_HOLES: tuple[Rule, ...] = (
    tuning.config,
    extents.zero,
    strides.layout,
    uneven.capacity,
    uneven.kind,
    extents.limit,
)
_OF_PLACE: tuple[Rule, ...] = (extents.zero, strides.layout, uneven.capacity)
# Checks whose verdict experiments cannot explain further.
_RULES: dict[str, tuple[Rule, ...]] = {
    "values": _OF_VALUES,
    "gradients": _OF_VALUES,
    "unwritten": _OF_HOLES,
    "bounds": _OF_PLACE,
    "error": (extents.zero,),
    "structure": (extents.zero,),
}
_FIRM = frozenset({"aliasing", "wrong-dtype", "use-after-free", "misaligned-access", "false-hint"})


def diagnose(lab: Lab) -> Diagnosis:
    """The cause of the lab's failure, or ``unexplained`` with what was ruled out."""
    direct = likely_cause(lab.verdict)
    by_ratio = direct == "gradient-scale" and not lab.verdict.because
    ratios = _ratios(lab) if by_ratio else []
    if by_ratio and not ratios:
        lab.ruled_out.append("a constant factor: other inputs have none")
        direct = None
    rules = _rules(lab, direct)
    if rules and not lab.attempt(lab.base).wrong:
        lab.ruled_out.append("the failure did not show again when its case was run once more")
        rules = ()
    for rule in rules:
        lab.begin_rule()
        known = len(lab.ruled_out)
        try:
            found = rule(lab)
        except Exception as error:  # noqa: BLE001 - an explanation must not lose the failure
            lab.ruled_out.append(f"{rule.__name__}: could not run ({type(error).__name__}: {error})")
            continue
        if found is not None:
            return Diagnosis(found.cause, found.evidence, lab.ruled_out, lab.runs)
        if lab.spent:
            del lab.ruled_out[known:]  # a rule with refused experiments has ruled out nothing
    stopped = [f"the experiments stopped at their limit, after {lab.runs} runs"] if lab.spent else []
    return Diagnosis(direct or UNEXPLAINED, [*_sentence(lab, direct, ratios), *stopped], lab.ruled_out, lab.runs)


def _rules(lab: Lab, direct: str | None) -> tuple[Rule, ...]:
    check = lab.verdict.check
    shown = check in ("gradients", "values") or bool(lab.verdict.because)
    if direct in _FIRM or (direct is not None and shown):
        return ()
    # A loop's end may be read from where a stride would not lead.
    if lab.verdict.identity in ("bounds:surroundings", "unwritten:scratch") or direct == "hang":
        return _OF_PLACE
    if check == "repeat":
        if isinstance(lab.verdict.evidence, WrongAccess):
            return strides.layout, uneven.capacity, sources.scattered, indices.mixed
        return ()
    return _RULES.get(check, ())


def _ratios(lab: Lab) -> list[float]:
    """The ratio of wrong to right gradient, in larger cases too; empty if it is 0 or not constant within a case.

    It may differ between cases: a mean forgets the number of its terms.
    """
    larger = lab.grown(None, (17, 19, 18, 21))
    ratios: list[float] = []
    seen = False
    for case in {case.key(): case for case in (lab.base, lab.grown(), larger)}.values():
        for seed in lab.seeds(case):
            answer = lab.attempt(case.with_(seed=seed))
            if not answer.wrong:
                continue
            failure = answer.probe.failure if answer.probe else None
            seen_there = failure.evidence if failure is not None and failure.cause == "gradient-scale" else None
            if not isinstance(seen_there, WrongGradient) or not seen_there.ratio_to_right:
                return []
            ratios.append(seen_there.ratio_to_right)
            seen = seen or case.key() == larger.key()
    return ratios if seen else []


def _sentence(lab: Lab, direct: str | None, ratios: list[float]) -> list[str]:
    """What the check itself shows, if it is the cause."""
    evidence = lab.verdict.evidence
    if direct is not None and lab.verdict.because:
        return [lab.verdict.because]
    if direct == "gradient-scale" and isinstance(evidence, WrongGradient) and evidence.ratio_to_right is not None:
        here, least, most = evidence.ratio_to_right, min(ratios, default=0.0), max(ratios, default=0.0)
        if most - least <= _ONE_FACTOR * abs(here):
            return [f"{here:.4g} times the right one, for other values and sizes alike"]
        others = f"another constant each, from {least:.4g} to {most:.4g}"
        return [f"{here:.4g} times the right one here; in {len(ratios)} cases of other values and sizes {others}"]
    if lab.verdict.check != "bounds":
        return []
    if isinstance(evidence, DamagedMemory):
        return [f"bytes {evidence.zone} the elements of {evidence.tensor} changed"]
    if isinstance(evidence, WrongAccess):
        return [f"{evidence.seen.kind} in line {evidence.seen.line} of {evidence.seen.kernel}"]
    return ["the result changes with the bytes that no tensor owns"]
