"""Check `malformed`: a call that breaks the spec is refused, or as right as the reference is.

Opt-in by ``malformed=True``, and a hazard in the profile `deep` without it. It runs on one case that passed, after all
other checks. A call is refused by the launcher's own ``raise`` or ``assert``, an exception of `rejects`, or any whose
message has the argument's name or a word for what is wrong with it. Where values alone are wrong (indices, offsets),
which a launcher sees only if it waits for the device, it is enough to touch no memory outside and to write all outputs.

On a GPU a read outside is seen only where a result depends on it, and an access that destroys the CUDA context ends the
process: the failure then names the call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_fusion.checks import memory
from pytest_fusion.checks.check import Check
from pytest_fusion.checks.context import CaseResult, Context, call_placed, reference_of, rejection, unasked
from pytest_fusion.checks.malformed.broken_calls import BrokenCall, broken_calls
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import (
    NO_ROOM_TO_JUDGE,
    NOT_MODELLED,
    OUT_OF_MEMORY,
    TOO_EXPENSIVE,
    Facts,
    Verdict,
    failed,
    hazard,
    passed,
    unknown,
)
from pytest_fusion.errors import SpecError
from pytest_fusion.oracle.reference import ReferenceFailed
from pytest_fusion.run.fused import Outcome
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.placing import Placed
from pytest_fusion.spec.wording import brief, plural, words

NAME, CODE = "malformed", "malformed-input"

REFUSED, EQUAL, INSIDE, UNJUDGED = "refused", "equal to the reference", "in bounds", "not judged"
WRITES, READS, CHANGES = "writes out of bounds", "reads out of bounds", "changes an input"
UNWRITTEN, WRONG, UNCLEAR = "leaves an output unwritten", "is silently wrong", "raises what does not state why"
# The worst first.
_BAD = (WRITES, READS, CHANGES, UNWRITTEN, WRONG, UNCLEAR)
# Words for what is wrong with an argument, as in torch's own messages.
_STATED = re.compile(
    r"\b(ind(ex|ices)|range|bounds|offsets?|d?types?|double|float64|fp64|int32|sizes?|shapes?|dimensions?|strides?|"
    r"contiguous|overlap\w*|devices?|cpu)\b",
    re.IGNORECASE,
)


@dataclass(slots=True)
class _State:
    """The verdict on the case from which the calls of a test are derived."""

    verdict: Verdict | None = None


def wanted(context: Context) -> bool:
    return context.on(NAME) and (context.spec.malformed or context.deep)


def due(trial: Trial) -> bool:
    """One case at the end of a test, and one that is judged alone; every case while a finding shrinks."""
    focus = trial.context.focus
    if focus.sought is not None:
        return focus.sought.startswith(f"{NAME}:")
    return wanted(trial.context) and (focus.closing or trial.context.complete)


def run(trial: Trial) -> Verdict:
    """The verdict on all broken calls together: a launcher is repaired once."""
    context = trial.context
    calls = broken_calls(trial.spec, trial.result.case, trial.logical, context.device)
    verdict = _verdict(context, [(call, *_answer(trial, call)) for call in calls])
    if context.focus.sought is None:
        context.state(_State).verdict = verdict
    return verdict


def summary(context: Context) -> Verdict | None:
    """The verdict of the one case; a hazard fails no check."""
    if not wanted(context):
        return unknown(NAME, "not requested: malformed=True or --fusion-profile deep switches it on")
    found = context.state(_State).verdict
    return found if found is None or not found.code else passed(NAME, found.evidence)


def _verdict(context: Context, answers: Sequence[tuple[BrokenCall, str, str]]) -> Verdict:
    if not answers:
        return unknown(NAME, "nothing to judge: the spec states nothing that a call of this case could break")
    not_tried = [] if context.device.type == "cuda" else ["another device: only a GPU has one"]
    shown_by = {call.name: shown for call, _, shown in answers if shown}
    results = {call.name: result for call, result, _ in answers}
    facts = Facts({"calls": results, "shown": shown_by, "not_tried": not_tried})
    bad = sorted((each for each in answers if each[1] in _BAD), key=lambda each: _BAD.index(each[1]))
    if not bad:
        return passed(NAME, facts)
    call, result, shown = bad[0]
    reason = (
        f"called with {call.name} ({call.detail}), the kernel {result}: {shown}. It may raise an exception that names "
        f"{call.argument}, or {'stay in bounds' if call.kind == 'numbers' else 'equal the reference'}; try {call.line}"
    )
    if bad[1:]:
        listed = ", ".join(f"{other.name} ({ended})" for other, ended, _ in bad[1:])
        reason += f". {plural(len(bad) - 1, 'other call')} like it: {listed}"
    # All results, so that the smallest case shows each of them.
    identity = f"{NAME}:{results}"
    if context.spec.malformed:
        return failed(NAME, reason, identity=identity, cause=CODE, evidence=facts)
    return hazard(NAME, CODE, reason, identity=identity, evidence=facts)


def _answer(trial: Trial, call: BrokenCall) -> tuple[str, str]:
    """The result of a broken call, and what shows it."""
    trial.context.began(f"{NAME} ({call.name})")
    outcome, placed = _called(trial, call, FILLS[0])
    accessed = memory.check_access(outcome, trial.spec)
    access = READS if accessed is None or "store" not in accessed.identity else WRITES
    changed = memory.check_inputs(placed.arena.changed(), trial.spec.given_up)
    for result, found in ((WRITES, memory.check_damage(outcome.damage)), (access, accessed), (CHANGES, changed)):
        if found is not None and found.failed:
            return WRONG if found.check == "repeat" else result, found.reason
    if outcome.error is not None:
        kind = rejection(trial.spec, outcome.error)
        unjudged = kind in (TOO_EXPENSIVE, NOT_MODELLED, OUT_OF_MEMORY)
        refused = kind is not None or refuses(call, outcome)
        return UNJUDGED if unjudged else REFUSED if refused else UNCLEAR, brief(outcome.error)
    return (_memory if call.kind == "numbers" else _values)(trial, call, outcome, placed)


def _called(trial: Trial, call: BrokenCall, fill: str) -> tuple[Outcome, Placed]:
    with trial.context.clock.phase("make"):
        placed = call.place(trial.context.device, fill)
    return call_placed(trial.context, trial.spec.fused, placed), placed


def refuses(call: BrokenCall, outcome: Outcome) -> bool:
    """Whether an exception is the launcher's own, or states what is wrong."""
    text = words(outcome.error)
    named = re.search(rf"(?<!\w){re.escape(call.argument)}(?!\w)", text)
    return outcome.raiser == "launcher" or named is not None or _STATED.search(text) is not None


def _memory(trial: Trial, call: BrokenCall, outcome: Outcome, placed: Placed) -> tuple[str, str]:
    """The result where memory alone counts: a second call, under the other fill, gives the same."""
    second, other = _called(trial, call, FILLS[1])
    got, again = (trial.collect(*each).tensors for each in ((outcome, placed), (second, other)))
    pairs = {name: (t, again[name]) for name, t in got.items() if name in again}
    unwritten = memory.check_unwritten({name: memory.unwritten_mask(outcome, second, *pairs[name]) for name in pairs})
    if unwritten.failed:
        return UNWRITTEN, unwritten.reason
    differing = repeat.first_difference(trial.steady(got), trial.steady(again))
    if differing is None:
        return INSIDE, ""
    return READS, f"{int(differing[1].sum())} element(s) of {differing[0]} depend on what no tensor holds"


def _values(trial: Trial, call: BrokenCall, outcome: Outcome, placed: Placed) -> tuple[str, str]:
    """The result of a call that returned, beside the reference's."""
    if trial.spec.random is not None:
        return UNJUDGED, "the reference has the random numbers of the case alone"
    try:
        reference, expected = reference_of(trial.context, call.case, call.logical)
    except (ReferenceFailed, SpecError) as error:
        kind = unasked(error) if isinstance(error, ReferenceFailed) else ""
        if kind in (TOO_EXPENSIVE, NO_ROOM_TO_JUDGE, NOT_MODELLED):
            return UNJUDGED, kind
        return WRONG, f"the reference refuses it ({brief(error.__cause__ or error)})"
    other = Trial(trial.context, CaseResult(call.case), call.logical, reference, expected, trial.alone)
    found = other.compare(other.collect(outcome, placed), excused=False)
    return (WRONG, found.reason) if found.failed else (EQUAL, "")


CHECK = Check(NAME, run, due=due, summary=summary, closes=wanted, cause=lambda _: CODE)
