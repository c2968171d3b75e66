"""One case through all checks: make the inputs, run the kernel, run the reference, conclude."""

from __future__ import annotations

import contextlib

from pytest_fusion.case import counter_random
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import large_offsets
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.checks import deterministic, memory, multiprocessors
from pytest_fusion.checks.configs import configs
from pytest_fusion.checks.context import (
    CaseResult,
    Context,
    call,
    conclude,
    error_verdict,
    reference_of,
    reject,
    rejection,
    unasked,
)
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.checks.kernels import compiles, refused, tf32
from pytest_fusion.checks.randomness.masks import LookFailed, drawn, seeded
from pytest_fusion.checks.registry import checks
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import DRY_RUN, IMPOSSIBLE, NO_ROOM_TO_JUDGE, TOO_EXPENSIVE, Verdict, passed, unknown
from pytest_fusion.interpreter.control import launch_replay
from pytest_fusion.oracle.reference import ReferenceFailed
from pytest_fusion.run.autotuned import launched
from pytest_fusion.run.fused import Outcome, compile_only
from pytest_fusion.run.memory import FILLS, region
from pytest_fusion.run.placing import place
from pytest_fusion.spec.wording import out_of_memory

# Enough that some seed requires all gradients: two in seven do.
_TURNS = 64
# Cases with fresh values that must repeat a statistical finding before as many do not: what half of all values show is
# found every second time. How many are tried: one may lack memory.
_REPEATS, _FRESH = 2, 5


def judge_case(context: Context, case: Case, *, again: bool = False) -> CaseResult:
    """Judge one case; ``again`` also calls the kernel with changed values at the same addresses.

    A statistical finding must repeat in two cases with fresh values before two do not show it; it is `unknown` where
    these cannot be judged.
    """
    result = _judge(context, case, again=again)
    for found in result.findings:
        if found.statistical and (other := _repeated(context, result, found)) is not None:
            return other
    return result


def _repeated(context: Context, result: CaseResult, found: Verdict) -> CaseResult | None:
    """Drop a statistical finding that fresh values do not repeat; return those that fail without statistics."""
    repeated = missed = 0
    for attempt in range(1, _FRESH + 1):
        second = _judge(context, _fresh(result.case, found, attempt), again=False)
        failure = second.failure
        if failure is not None and not failure.statistical:
            return second
        alike = (verdict for verdict in second.findings if verdict.failed or not found.failed)
        same = any(verdict.check == found.check and verdict.statistical for verdict in alike)
        missed += not same and second.rejected is None
        if missed == _REPEATS:
            context.progress.unrepeated += 1
            _replace(result, found, passed(found.check, unrepeated=found.reason))
            return None
        repeated += same
        if repeated == _REPEATS:
            return None
    _replace(result, found, unknown(found.check, f"{found.reason}; cases with fresh values could not be judged"))
    return None


def _replace(result: CaseResult, found: Verdict, instead: Verdict) -> None:
    result.verdicts = [*(verdict for verdict in result.verdicts if verdict is not found), instead]


def _fresh(case: Case, found: Verdict, attempt: int) -> Case:
    """The case with new values; after a gradient failure, with every gradient of a random upstream one."""
    # Most other seeds give an upstream gradient of zeros, of one number or sign, or omit inputs, which hides errors.
    seeds = (counter_random.mix(case.seed, "confirm", attempt, turn) >> 1 for turn in range(_TURNS))
    plain = (seed for seed in seeds if found.check != gradients.NAME or gradients.all_gradients(seed))
    return case.with_(seed=next(plain, counter_random.mix(case.seed, "confirm", attempt) >> 1))


def dry_run(context: Context, case: Case) -> CaseResult:
    """The launches that a case would make, its kernels compiled but not run; nothing is judged."""
    result = CaseResult(case, rejected=DRY_RUN)
    try:
        logical = make_inputs(context.spec, case, context.device)
    except (ImpossibleCase, InputFailed):
        return result
    with launched(case.configs, result.tuned):
        result.launches = compile_only(
            context.spec.fused, place(logical, case, context.device, FILLS[0]), context.extra
        )
        if context.spec.grad and context.on(gradients.NAME):
            with contextlib.suppress(Exception):  # what stops the reference or the kernel shows in the test itself
                reference, expected = reference_of(context, case, logical, priced=False)
                trial = Trial(context, result, logical, reference, expected, lambda _: result)
                if gradients.due(trial):
                    gradients.compile_only(trial)
    return result


def _judge(context: Context, case: Case, *, again: bool) -> CaseResult:
    result = CaseResult(case, known=context.focus.known)
    watching = compiles.seen(context), tf32.noted(context, result)
    machine = multiprocessors.described(case), launched(case.configs, result.tuned)
    with machine[0], machine[1], watching[0], watching[1], launch_replay.allowed():
        result = _judge_noting(context, case, result, again=again)
    result.case = configs.as_launched(result)
    return result


def _judge_noting(context: Context, case: Case, result: CaseResult, *, again: bool) -> CaseResult:
    if any(tensor.layout.kind == large_offsets.KIND for tensor in case.tensors.values()):
        lacking = region.lacking(large_offsets.far_tensors(context.spec, case).values(), context.device)
        if lacking is not None:
            return reject(context, result, NO_ROOM_TO_JUDGE, MemoryError(lacking))
    try:
        return _judge_made(context, case, result, again=again)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        # Errors of the kernel are in its outcome; this is the judge's own, such as of two dozen lanes needed late.
        result.verdicts.clear()
        return reject(context, result, NO_ROOM_TO_JUDGE, error)
    except ReferenceFailed as error:
        kind = unasked(error)
        if kind not in (NO_ROOM_TO_JUDGE, TOO_EXPENSIVE):
            raise
        result.verdicts.clear()
        return reject(context, result, kind, error)


def _judge_made(context: Context, case: Case, result: CaseResult, *, again: bool) -> CaseResult:
    every = context
    context = seeded(context, case)
    try:
        with context.clock.phase("make"):
            logical = make_inputs(context.spec, case, context.device)
    except ImpossibleCase as error:
        return reject(context, result, IMPOSSIBLE, error)
    except InputFailed as error:
        lacking = out_of_memory(error.__cause__)
        return reject(
            context, result, NO_ROOM_TO_JUDGE if lacking else f"inputs {type(error.__cause__).__name__}", error
        )
    first, placed = call(context, case, logical, FILLS[0])
    result.launches = first.launches
    if first.watch is not None:
        result.work = len(first.launches) + first.watch.worked
    if first.error is not None and (kind := rejection(context.spec, first.error)):
        return reject(context, result, kind, first.error)
    try:
        context, draws = drawn(context, case, logical, first, placed)
        reference, expected = reference_of(context, case, logical)
        deterministic.note(context, expected)
        result.compared = any(t.numel() for t in expected.tensors.values()) or any(
            value is not None for value in expected.plain.values()
        )
    except LookFailed as look:
        return _raised(context, result, look.outcome)
    except ReferenceFailed as error:
        # A case outside the reference's domain is no evidence against the kernel.
        return reject(context, result, unasked(error), error)
    if first.error is not None:
        return _raised(context, result, first)
    accessed = memory.check_access(first, context.spec)
    if accessed is not None and conclude(context, result, accessed):
        return result
    trial = Trial(context, result, logical, reference, expected, lambda other: _judge(every, other, again=False), draws)
    trial.run(first, placed, again=again)
    _run_checks(context, trial)
    return result


def _run_checks(context: Context, trial: Trial) -> None:
    """The checks that make calls of their own, until one fails."""
    result = trial.result
    for check in checks():
        if check.run is None:
            continue
        if result.failure is not None or result.rejected is not None or context.focus.until in ("", result.reached):
            break
        result.reached = check.name
        if context.on(check.name) and check.missing(context.spec, context.device) is None and check.due(trial):
            context.began(check.name)
            with context.clock.check(check.name):
                verdict = check.run(trial)
            conclude(context, result, verdict)


def _raised(context: Context, result: CaseResult, outcome: Outcome) -> CaseResult:
    """The result of a case in which the kernel raised."""
    assert outcome.error is not None
    kind = rejection(context.spec, outcome.error)
    if kind is not None:
        return reject(context, result, kind, outcome.error)
    if refused.note(context, result.case, outcome, outcome.launches):
        return reject(context, result, type(outcome.error).__name__, outcome.error)
    accessed = memory.check_access(outcome, context.spec)
    if accessed is not None and context.on(accessed.check):
        conclude(context, result, accessed)
    else:
        conclude(context, result, error_verdict(outcome))
        result.trace = outcome.trace
    return result
