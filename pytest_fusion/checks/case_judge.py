"""One case through all checks: make the inputs, run the kernel, run the reference, conclude."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from pytest_fusion.case import counter_random
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import large_offsets
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.checks import deterministic, memory, multiprocessors
from pytest_fusion.checks.configs import configs
from pytest_fusion.checks.context import (
    Bench,
    CaseResult,
    allows_chance,
    call,
    conclude,
    error_verdict,
    reference_of,
    reject,
    rejection,
    unasked,
)
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.checks.randomness.masks import LookFailed, seeded, told
from pytest_fusion.checks.registry import CHECKS
from pytest_fusion.checks.rejections import DRY_RUN, IMPOSSIBLE, NO_ROOM_TO_JUDGE, TOO_EXPENSIVE
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, passed, unknown
from pytest_fusion.interpreter.control import launch_replay
from pytest_fusion.oracle.reference import ReferenceFailed
from pytest_fusion.run.autotuned import noted
from pytest_fusion.run.fused import Outcome, compile_only
from pytest_fusion.run.memory import FILLS, room
from pytest_fusion.run.placing import place
from pytest_fusion.spec.wording import out_of_memory

# Enough that some seed asks plainly: two in seven do.
_TURNS = 64
# Cases with fresh values that repeat a statistical failure, of so many at most: one may find no memory, say.
_REPEATS, _FRESH = 2, 4

__all__ = ["Bench", "CaseResult", "dry_run", "judge_case"]


def judge_case(bench: Bench, case: Case, *, again: bool = False) -> CaseResult:
    """Judge one case; ``again`` also calls the kernel with changed values at the same addresses.

    A purely statistical failure of ``values`` counts only when two cases with fresh values repeat it, and is `unknown`
    where such cases cannot be judged.
    """
    result = _judge(bench, case, again=again)
    result = _unless_tuning(bench, result)
    found = result.failure
    if found is None or not found.statistical:
        return result
    repeated = 0
    for attempt in range(1, _FRESH + 1):
        second = _judge(bench, _fresh(case, found, attempt), again=False)
        if second.failure is not None and not second.failure.statistical:
            return second
        if second.failure is None and second.rejected is None:
            bench.unrepeated += 1
            return _with(result, found, passed(found.check, unrepeated=found.reason))
        repeated += second.failure is not None
        if repeated == _REPEATS:
            return result
    return _with(result, found, unknown(found.check, f"{found.reason}; cases with fresh values could not be judged"))


def _with(result: CaseResult, found: Verdict, instead: Verdict) -> CaseResult:
    result.verdicts = [*(verdict for verdict in result.verdicts if verdict is not found), instead]
    return result


def _fresh(case: Case, found: Verdict, attempt: int) -> Case:
    """The case with other values; after a wrong gradient, such as ask for all gradients, with a random upstream one.

    Most others have an upstream gradient of zeros, of one repeated number or of one sign, or leave inputs out: a
    rounding too many does not show there.
    """
    seeds = (counter_random.mix(case.seed, "confirm", attempt, turn) >> 1 for turn in range(_TURNS))
    asked = (seed for seed in seeds if found.check != gradients.NAME or gradients.asks_plainly(seed))
    return case.with_(seed=next(asked, counter_random.mix(case.seed, "confirm", attempt) >> 1))


def dry_run(bench: Bench, case: Case) -> CaseResult:
    """The launches that a case would make, its kernels compiled but not run; nothing is judged."""
    result = CaseResult(case, rejected=DRY_RUN)
    try:
        logical = make_inputs(bench.spec, case, bench.device)
    except (ImpossibleCase, InputFailed):
        return result
    result.launches = compile_only(bench.spec.fused, place(logical, case, bench.device, FILLS[0]), bench.extra)
    if bench.spec.grad and bench.on(gradients.NAME):
        with contextlib.suppress(Exception):  # what stops the reference or the kernel here is told by the test itself
            reference, expected = reference_of(bench, case, logical, priced=False)
            trial = Trial(bench, result, logical, reference, expected, lambda _: result)
            if gradients.due(trial):
                gradients.compile_only(trial)
    return result


def _unless_tuning(bench: Bench, result: CaseResult) -> CaseResult:
    """A failed case as it stands, unless a call of it tuned a kernel and that is what fails."""
    found = result.failure
    if found is None or found.check == configs.NAME or not bench.on(configs.NAME):
        return result
    if not any(seen.tuning for seen in result.tuned.values()):
        return result
    configs.suspects_tuning(bench, so=True)
    second = _judge(replace(bench, until=None, sought=None), result.case, again=False)
    configs.suspects_tuning(bench, so=False)
    return second if second.failure is not None and second.failure.check == configs.NAME else result


def _judge(bench: Bench, case: Case, *, again: bool) -> CaseResult:
    result = CaseResult(case)
    with noted(result.tuned), multiprocessors.described(case), launch_replay.allowed():
        return _judge_noting(bench, case, result, again=again)


def _judge_noting(bench: Bench, case: Case, result: CaseResult, *, again: bool) -> CaseResult:
    if any(tensor.layout.kind == large_offsets.KIND for tensor in case.tensors.values()):
        lacking = room.lacking(large_offsets.far_tensors(bench.spec, case).values(), bench.device)
        if lacking is not None:
            return reject(bench, result, NO_ROOM_TO_JUDGE, MemoryError(lacking))
    try:
        return _judge_made(bench, case, result, again=again)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        # What a kernel raises is in its outcome, so this is the judge's own: of two dozen lanes asked for late, say.
        result.verdicts.clear()
        return reject(bench, result, NO_ROOM_TO_JUDGE, error)
    except ReferenceFailed as error:
        kind = unasked(error)
        if kind not in (NO_ROOM_TO_JUDGE, TOO_EXPENSIVE):
            raise
        result.verdicts.clear()
        return reject(bench, result, kind, error)


def _judge_made(bench: Bench, case: Case, result: CaseResult, *, again: bool) -> CaseResult:
    every = bench
    bench = seeded(bench, case)
    try:
        with bench.clock.phase("make"):
            logical = make_inputs(bench.spec, case, bench.device)
    except ImpossibleCase as error:
        return reject(bench, result, IMPOSSIBLE, error)
    except InputFailed as error:
        lacking = out_of_memory(error.__cause__)
        return reject(bench, result, NO_ROOM_TO_JUDGE if lacking else f"inputs {type(error.__cause__).__name__}", error)
    first, placed = call(bench, case, logical, FILLS[0])
    result.launches = first.launches
    if first.watch is not None:
        result.work = len(first.launches) + first.watch.worked
    if first.error is not None and (kind := rejection(bench.spec, first.error)):
        return reject(bench, result, kind, first.error)
    try:
        bench = told(bench, case, logical, first, placed)
        reference, expected = reference_of(bench, case, logical)
        deterministic.note(bench, expected)
        result.compared = any(t.numel() for t in expected.tensors.values()) or any(
            value is not None for value in expected.plain.values()
        )
    except LookFailed as look:
        return _raised(bench, result, look.outcome)
    except ReferenceFailed as error:
        # A case outside the reference's own domain asks nothing of the kernel.
        return reject(bench, result, unasked(error), error)
    if first.error is not None:
        return _raised(bench, result, first)
    accessed = memory.check_access(first, chance=allows_chance(bench.spec))
    if accessed is not None and conclude(bench, result, accessed):
        return result
    trial = Trial(bench, result, logical, reference, expected, lambda other: _judge(every, other, again=False))
    trial.run(first, placed, again=again)
    for check in CHECKS:
        if result.failure is not None or result.rejected is not None or bench.until in ("", result.reached):
            break
        result.reached = check.NAME
        if bench.on(check.NAME) and check.missing(bench.spec, bench.device) is None and check.due(trial):
            bench.began(check.NAME)
            with bench.clock.check(check.NAME):
                verdict = check.run(trial)
            conclude(bench, result, verdict)
    return result


def _raised(bench: Bench, result: CaseResult, outcome: Outcome) -> CaseResult:
    """A case that ends with what the kernel raised."""
    assert outcome.error is not None
    kind = rejection(bench.spec, outcome.error)
    if kind is not None:
        return reject(bench, result, kind, outcome.error)
    accessed = memory.check_access(outcome, chance=allows_chance(bench.spec))
    if accessed is None or not conclude(bench, result, accessed):
        conclude(bench, result, error_verdict(outcome))
        result.trace = outcome.trace
    return result
