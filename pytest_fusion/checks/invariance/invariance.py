"""Check `invariance`: a slice along a dim named in ``invariant=`` has the same bits beside any neighbours.

The case's inputs are cut along the dim and called again: a slice alone, all in another order, beside NaN, and repeated
to sizes near those at which launchers choose between kernels. Outputs and inputs written in place that follow the dim
must keep each slice's bits; two sizes show which axis follows it. A call that does not repeat its own bits is left to
`repeat`. Left out: outputs that may vary by ``deterministic=``. `sliced_gradients` checks gradients that are right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.checks import memory
from pytest_fusion.checks.check import Check
from pytest_fusion.checks.context import call, rejection, same_draws
from pytest_fusion.checks.invariance.batches import NAME, Batches, Effort, InvarianceState, Spent, width
from pytest_fusion.checks.invariance.case_slices import Unsliceable, resized, tensors, unsliceable
from pytest_fusion.checks.invariance.neighbours import Along, Call, Called, OtherCase
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, passed, unknown
from pytest_fusion.run.fused import Outcome
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.memory.damage import Damage
from pytest_fusion.spec.fusion_spec import FusionSpec

# A case costs some twenty calls, so few run, half of them not thorough; several dims share the calls of a case.
_EFFORT = Effort(any_case=3, thorough=6, wide=4, calls=22)
_FEWEST_CALLS = 7
# Below launchers' usual thresholds of 64 and more.
MANY = 37


class OneDim(Protocol):
    """The result of up to ``calls`` calls for one dim; ``wide``: with more slices than the case has."""

    def __call__(self, dim: str, calls: int, *, wide: bool) -> tuple[Verdict | None, Along]: ...


def missing(spec: FusionSpec, device: torch.device) -> str | None:  # noqa: ARG001
    """Why there is nothing to check: ``invariant=`` names no dim, or none that can be cut."""
    if not spec.invariant_dims:
        return "not requested: invariant= names no dim"
    reasons = unsliceable(spec)
    return "; ".join(reasons.values()) if len(reasons) == len(spec.invariant_dims) else None


def due(trial: Trial) -> bool:
    """Few cases of a test, thorough ones first; every case while a finding shrinks."""
    return any(_EFFORT.due(_so_far(trial), trial, width(trial, dim)) for dim in dims_of(trial))


def run(trial: Trial) -> Verdict:
    """Check every dim with at least two slices in this case."""
    so_far = _so_far(trial)

    def one(dim: str, calls: int, *, wide: bool) -> tuple[Verdict | None, Along]:
        many = of_many(trial, dim, so_far, outputs) if wide else trial
        along = Along(many, dim, so_far, outputs)
        return along.judge(calls), along

    return of_dims(trial, so_far, _EFFORT, one, unsliceable(trial.spec)) or passed(NAME)


def of_dims(
    trial: Trial, so_far: Spent, effort: Effort, one: OneDim, reasons: dict[str, str], *, gradients: bool = False
) -> Verdict | None:
    """The result of ``one`` for every dim; ``reasons`` are why others have none. ``None`` without a dim."""
    dims = dims_of(trial)
    wide = effort.note(so_far, trial, max(width(trial, dim) for dim in dims)) and not so_far.found
    sizes: dict[str, list[int]] = {}
    for dim in dims:
        try:
            verdict, along = one(dim, max(effort.calls // len(dims), _FEWEST_CALLS), wide=wide)
        except Unsliceable as error:
            reasons[dim] = f"{dim}: {error}"
            continue
        except OtherCase as error:
            if adopt(trial, dim, error.args[0]):
                return unknown(NAME, f"the kernel fails another check at {dim}={error.args[0]}")
            call = "backward" if gradients else "call"
            reasons[dim] = f"{dim}: a {call} with other slices of the same inputs failed"
            continue
        if verdict is not None and verdict.failed:
            trial.result.case = along.trial.result.case
            return verdict
        if verdict is not None:
            reasons[dim] = f"{dim}: {verdict.reason}"
        elif along.seen:
            sizes[dim] = along.seen
    if reasons:
        about = "gradients, " if gradients else ""
        return unknown(NAME, f"{about}{'; '.join(reasons.values())}", sizes=sizes)
    return passed(NAME, sizes=sizes) if sizes else None


def of_many(trial: Trial, dim: str, so_far: Spent, make: Call) -> Trial:
    """The case with `MANY` slices of other values, or unchanged if it has as many or cannot; ``make`` calls it once."""
    # Another order of a sum shows in one row of ten, or fewer: of two rows repeated to 257, usually in none.
    size, context = trial.result.case.sizes[dim], trial.context
    assert isinstance(size, int)
    if size >= MANY or not Batches(trial, dim, so_far).fits(MANY):
        return trial
    case = resized(trial.result.case, dim, MANY)
    try:
        with context.clock.phase("make"):
            made = make_inputs(trial.spec, case, context.device)
        many = trial.with_({**made, **same_draws(trial.spec, trial.logical)}, case)
        return trial if make(many, range(MANY)) is None else many
    except (ImpossibleCase, InputFailed, OtherCase):
        return trial


def outputs(trial: Trial, slices: Sequence[int]) -> Called | None:
    """A forward call, and its outputs that may not vary; see `neighbours.Call`."""
    outcome, placed = call(trial.context, trial.result.case, trial.logical, FILLS[0])
    if refused(trial, outcome, outcome.damage, slices):
        return None
    steady = trial.steady(trial.collect(outcome, placed).tensors)
    return Called({name: t.detach().clone() for name, t in steady.items()}, outcome.launches)


def refused(trial: Trial, outcome: Outcome, damage: Iterable[Damage], slices: Sequence[int]) -> bool:
    """Whether the kernel refused these slices. Raises ``OtherCase`` for other errors."""
    if outcome.error is not None and rejection(trial.spec, outcome.error) is not None:
        return True
    accessed = memory.check_access(outcome, trial.spec)
    if outcome.error is not None or accessed is not None or memory.check_damage(damage).failed:
        raise OtherCase(len(slices))
    return False


def dims_of(trial: Trial) -> list[str]:
    """The dims to check in this case."""
    never, sizes = unsliceable(trial.spec), trial.result.case.sizes
    return [
        dim
        for dim in trial.spec.invariant_dims
        if dim not in never
        and isinstance(size := sizes[dim], int)
        and size >= 2
        and any(t.numel() for t in _carriers(trial, dim))
    ]


def adopt(trial: Trial, dim: str, size: int) -> bool:
    """Judge the case of another size by itself; its failure is then the finding."""
    alone = trial.alone(resized(trial.result.case, dim, size))
    if alone.failure is None or alone.failure.statistical:
        return False
    result = trial.result
    result.case, result.verdicts = alone.case, alone.verdicts
    result.evidence, result.trace, result.launches = alone.evidence, alone.trace, alone.launches
    return True


def _so_far(trial: Trial) -> Spent:
    return trial.context.state(InvarianceState).outputs


def _carriers(trial: Trial, dim: str) -> Iterator[torch.Tensor]:
    for name, inner in tensors(trial.spec):
        value = trial.logical.get(name)
        if dim in inner.shape.names and isinstance(value, torch.Tensor):
            yield value


CHECK = Check(NAME, run, due=due, missing=missing, cause=lambda _: "batch-variant", parts=("gradients",))
