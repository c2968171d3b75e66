"""Check `malformed`: a call that breaks the spec is refused, or as right as the reference is.

Opt-in by ``malformed=True``, and a hazard in the profile `deep` without it. It runs once in a test, on a case that
passed every other check, after all others. A call may end in one of three ways:

- refused: the launcher's own ``raise`` or ``assert``, an exception of `rejects`, or any whose message names the
  argument or speaks of what is wrong with it (size, dtype, index), as torch's own does;
- equal to the reference, where the reference takes the same call;
- in bounds: where values alone are wrong (indices, offsets), which a launcher sees only if it waits for the device, and
  the reference refuses them, it is enough to touch no memory outside and to write all of the outputs.

On a GPU a read outside is seen only where a result depends on it, and one that destroys the CUDA context ends the
process: it is reported with the call that was running, and the indices come last. The reference is first tried with
wrong values on the host, where it raises, since on the device its assert would end the process too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_fusion.case.containers import map_tensors
from pytest_fusion.checks import memory
from pytest_fusion.checks.check import Check
from pytest_fusion.checks.context import (
    CaseResult,
    Context,
    call_placed,
    reader,
    reference_of,
    rejection,
    unasked,
)
from pytest_fusion.checks.malformed.broken_calls import BrokenCall, broken_calls, not_tried
from pytest_fusion.checks.outputs import Outputs
from pytest_fusion.checks.rejections import NOT_MODELLED, OUT_OF_MEMORY, TOO_EXPENSIVE
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, failed, hazard, passed, unknown
from pytest_fusion.errors import SpecError
from pytest_fusion.oracle.reference import ReferenceCrashed, ReferenceFailed, ReferenceRun, run_reference
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


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a broken call, one of the above, and what shows it."""

    call: BrokenCall
    result: str
    shown: str


@dataclass(slots=True)
class _State:
    """The verdict on the case of a test that these calls were derived from."""

    verdict: Verdict | None = None


def wanted(context: Context) -> bool:
    return context.on(NAME) and (context.spec.malformed or context.deep)


def due(trial: Trial) -> bool:
    """One case at the end of a test, and one that is judged alone; every case while a finding shrinks."""
    context = trial.context
    if context.focus.sought is not None:
        return context.focus.sought.startswith(f"{NAME}:")
    return wanted(context) and (context.focus.closing or context.complete)


def run(trial: Trial) -> Verdict:
    """The verdict on all broken calls together: a launcher is repaired once."""
    context = trial.context
    calls = broken_calls(trial.spec, trial.result.case, trial.logical, context.device)
    verdict = _verdict(context, [_answer(trial, call) for call in calls])
    if context.focus.sought is None:
        context.state(_State).verdict = verdict
    return verdict


def summary(context: Context) -> Verdict | None:
    """The verdict of the one case."""
    if not wanted(context):
        return unknown(NAME, "not requested: malformed=True or --fusion-profile deep switches it on")
    found = context.state(_State).verdict
    return found if found is None or found.status != "hazard" else passed(NAME, found.evidence)


def ended(reason: str) -> Verdict:
    """The failure of a broken call that ended its process, or did not return."""
    return failed(NAME, reason, identity=f"{NAME}:process", cause=CODE)


def _verdict(context: Context, answers: Sequence[Answer]) -> Verdict:
    if not answers:
        return unknown(NAME, "nothing to judge: the spec states nothing that a call of this case could break")
    facts = {
        "calls": {each.call.name: each.result for each in answers},
        "shown": {each.call.name: each.shown for each in answers if each.shown},
        "not_tried": not_tried(context.device),
    }
    wrong = sorted((each for each in answers if each.result in _BAD), key=lambda each: _BAD.index(each.result))
    if not wrong:
        return passed(NAME, **facts)
    worst, *others = wrong
    call = worst.call
    reason = (
        f"called with {call.name} ({call.detail}), the kernel {worst.result}: {worst.shown}. It may raise an exception "
        f"that names {call.argument}, or equal the reference. To refuse it: {call.line}"
    )
    if others:
        listed = ", ".join(f"{each.call.name} ({each.result})" for each in others)
        reason += f". So it is with {plural(len(others), 'other call')}: {listed}"
    identity = f"{NAME}:{call.argument}:{call.kind}"
    if context.spec.malformed:
        return failed(NAME, reason, identity=identity, cause=CODE, **facts)
    return hazard(NAME, CODE, reason, identity=identity, **facts)


def _answer(trial: Trial, call: BrokenCall) -> Answer:
    context, spec = trial.context, trial.spec
    context.began(f"{NAME} ({call.name})")
    outcome, placed = _called(trial, call, FILLS[0])
    changed = memory.check_inputs(placed.arena.changed(), spec.given_up)
    damaged = memory.check_damage(outcome.damage)
    accessed = memory.check_access(outcome, spec)
    if damaged.failed:
        return Answer(call, WRITES, damaged.reason)
    if accessed is not None:
        return Answer(call, WRITES if "store" in accessed.identity else READS, accessed.reason)
    if changed.failed:
        return Answer(call, CHANGES, changed.reason)
    if outcome.error is not None:
        kind = rejection(spec, outcome.error)
        unjudged = kind in (TOO_EXPENSIVE, NOT_MODELLED, OUT_OF_MEMORY)
        refused = kind is not None or refuses(call, outcome)
        return Answer(call, UNJUDGED if unjudged else REFUSED if refused else UNCLEAR, brief(outcome.error))
    return Answer(call, *_silent(trial, call, outcome, placed))


def _called(trial: Trial, call: BrokenCall, fill: str) -> tuple[Outcome, Placed]:
    context = trial.context
    with context.clock.phase("make"):
        placed = call.place(context.device, fill)
    return call_placed(context, trial.spec.fused, placed), placed


def refuses(call: BrokenCall, outcome: Outcome) -> bool:
    """Whether an exception is the launcher's own, or states what is wrong in one of the call's ``words``."""
    if outcome.raiser == "launcher":
        return True
    pattern = "|".join(map(re.escape, call.words))
    return re.search(rf"(?<!\w)(?:{pattern})(?!\w)", words(outcome.error), re.IGNORECASE) is not None


def _silent(trial: Trial, call: BrokenCall, outcome: Outcome, placed: Placed) -> tuple[str, str]:
    """The result of a call that returned, and what shows it."""
    context = trial.context
    if trial.spec.random is not None:
        return UNJUDGED, "the reference has the random numbers of the case alone"
    try:
        reference, expected = _expected(trial, call)
    except ReferenceFailed as error:
        kind = unasked(error)
        if not kind.startswith("reference "):
            return UNJUDGED, kind
        refusal = f"the reference refuses it ({brief(error.__cause__ or error)})"
        return _memory(trial, call, outcome, placed, refusal) if call.by_values else (WRONG, refusal)
    other = Trial(context, CaseResult(call.case), call.logical, reference, expected, trial.alone)
    found = other.compare(other.collect(outcome, placed), excused=False)
    return (WRONG, found.reason) if found.failed else (EQUAL, "")


def _expected(trial: Trial, call: BrokenCall) -> tuple[ReferenceRun, Outputs]:
    """The reference of the broken call. Raises ``ReferenceFailed`` where it refuses."""
    context = trial.context
    try:
        if call.by_values and context.device.type == "cuda":
            host: dict[str, Any] = {name: map_tensors(value, lambda t: t.cpu()) for name, value in call.logical.items()}
            run_reference(trial.spec, host, context.extra, reader(trial.spec), lanes=0, seed=0)
        return reference_of(context, call.case, call.logical)
    except ReferenceCrashed:
        raise
    except SpecError as error:
        raise ReferenceFailed(str(error)) from error


def _memory(trial: Trial, call: BrokenCall, outcome: Outcome, placed: Placed, refusal: str) -> tuple[str, str]:
    """The result where only memory counts: a second call, under the other fill, gives the same."""
    second, other = _called(trial, call, FILLS[1])
    got, again = trial.collect(outcome, placed).tensors, trial.collect(second, other).tensors
    pairs = {name: (t, again[name]) for name, t in got.items() if name in again}
    masks = {name: memory.unwritten_mask(outcome, second, *pair) for name, pair in pairs.items()}
    unwritten = memory.check_unwritten(masks)
    if unwritten.failed:
        return UNWRITTEN, unwritten.reason
    if (found := repeat.first_difference(trial.steady(got), trial.steady(again))) is not None:
        return READS, f"{int(found[1].sum())} element(s) of {found[0]} depend on what no tensor holds"
    return INSIDE, refusal


CHECK = Check(NAME, run, due=due, summary=summary, closes=wanted, cause=lambda _: CODE)
