"""One case judged with changed values, or given values in another layout, which no case can state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.checks import memory, multiprocessors
from pytest_fusion.checks.context import (
    CaseResult,
    Context,
    call,
    collect,
    conclude,
    error_verdict,
    reader,
    reference_of,
    reject,
    rejection,
    unasked,
)
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.checks.gradients.backward import Attempt
from pytest_fusion.checks.gradients.upstream import NoGraph, Upstream
from pytest_fusion.checks.randomness.masks import LookFailed, drawn, seeded
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import IMPOSSIBLE, Verdict
from pytest_fusion.errors import SpecError
from pytest_fusion.oracle import OutputLanes
from pytest_fusion.oracle.reference import ReferenceFailed, run_reference
from pytest_fusion.run.autotuned import Tuned, launched
from pytest_fusion.run.fused import Outcome
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.placing import Placed, laid_apart

Edit = Callable[[dict[str, Any]], dict[str, Any]]
Against = OutputLanes | torch.Tensor

# Checks that one call can fail; the others compare calls, as `Trial.run` does.
_ONE_CALL = frozenset({"values", "gradients", "error"})


@dataclass(slots=True)
class Probe:
    """The result of one call: outputs ``got`` and ``expected`` by name, and the ``lanes`` that judge them.

    They are empty where the call or the reference failed. ``placed`` are the kernel's tensors; ``trial`` runs a
    backward.
    """

    result: CaseResult
    logical: Mapping[str, Any] = field(default_factory=dict)
    placed: Placed | None = None
    got: dict[str, torch.Tensor] = field(default_factory=dict)
    expected: dict[str, torch.Tensor] = field(default_factory=dict)
    lanes: dict[str, Against] = field(default_factory=dict)
    unwritten: dict[str, torch.Tensor] = field(default_factory=dict)
    trial: Trial | None = None

    @property
    def failure(self) -> Verdict | None:
        return self.result.failure


def probe(
    context: Context, case: Case, check: str, *, laid: Case | None = None, edit: Edit | None = None, again: bool = False
) -> Probe:
    """Judge ``case``, changed by ``edit``, in the layout of ``laid``, by ``check`` and the checks before it.

    An edit may raise ``ImpossibleCase``. Raises ``SpecError`` where the reference cannot take the values.
    """
    quiet = {**context.spec.without, "vacuity": "not needed", "invariance": "not needed"}
    every = replace(context, spec=context.spec.with_(without=quiet))
    tuned: dict[int, Tuned] = {}
    with multiprocessors.described(case), launched(case.configs, tuned):
        found = _probe(every, case, check, laid or case, edit, again=again)
    found.result.tuned = tuned
    return found


def _probe(every: Context, case: Case, check: str, laid: Case, edit: Edit | None, *, again: bool) -> Probe:
    context = seeded(every, case)
    result = CaseResult(laid, known=context.focus.known)
    found = Probe(result)
    try:
        with context.clock.phase("make"):
            logical = make_inputs(context.spec, case, context.device)
            if edit is not None:
                logical = edit(logical)
                result.case = laid_apart(laid, logical)
            found.logical = logical
    except ImpossibleCase as error:
        reject(context, result, IMPOSSIBLE, error)
        return found
    except InputFailed as error:
        reject(context, result, f"inputs {type(error.__cause__).__name__}", error)
        return found
    first, found.placed = call(context, result.case, logical, FILLS[0])
    result.launches = first.launches
    if first.error is not None and (kind := rejection(context.spec, first.error)):
        reject(context, result, kind, first.error)
        return found
    try:
        context, draws = drawn(context, case, logical, first, found.placed)
        reference, expected = reference_of(context, case, logical)
    except LookFailed as look:
        reject(context, result, "no mask", look)
        return found
    except ReferenceFailed as error:
        reject(context, result, unasked(error), error)
        return found
    if first.error is not None:
        conclude(context, result, error_verdict(first))
        return found
    trial = Trial(context, result, logical, reference, expected, lambda other: probe(every, other, check).result, draws)
    _judge(found, trial, first, check, again=again)
    return found


def _judge(found: Probe, trial: Trial, first: Outcome, check: str, *, again: bool) -> None:
    """Judge the first call, and make other calls that the check needs."""
    context, result = trial.context, found.result
    assert found.placed is not None
    got = trial.collect(first, found.placed)
    found.got, found.expected = got.tensors, trial.expected.tensors
    found.lanes = dict(zip(trial.order, trial.reference.lanes or trial.reference.native, strict=True))
    found.unwritten = _unwritten(first, found.got)
    accessed = memory.check_access(first, context.spec)
    if accessed is not None and conclude(context, result, accessed):
        return
    got_forms, forms = ({n: (t.shape, t.dtype) for n, t in side.items()} for side in (found.got, found.expected))
    if check not in _ONE_CALL or got_forms != forms:
        trial.run(first, found.placed, again=again)
        return
    trial.got, found.trial = got, trial
    trial.note_values(got, trial.judge(got))
    if result.failure is None and check == gradients.NAME and gradients.due(trial):
        conclude(context, result, gradients.run(trial))
        if result.evidence is not None:
            name, tensor, against = result.evidence
            found.got, found.lanes = {name: tensor}, {name: against}
            found.expected = {name: against.native if isinstance(against, OutputLanes) else against}


def _unwritten(outcome: Outcome, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    masks = {name: outcome.watch.unwritten(t) for name, t in tensors.items()} if outcome.watch is not None else {}
    return {name: mask for name, mask in masks.items() if mask is not None and bool(mask.any())}


def unwritten(found: Probe) -> dict[str, torch.Tensor]:
    """Elements that no store has reached: of the outputs, or of the gradients after a backward."""
    if found.trial is None:
        return found.unwritten
    upstream = Upstream.of(found.trial, gradients.wanted(found.trial))
    upstream.settle()
    attempt = Attempt(found.trial, upstream, FILLS[0])
    return _unwritten(attempt.outcome, attempt.named())


def gradient(found: Probe, name: str, order: Sequence[int] | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The kernel's gradient of an input, right or wrong, and its exact value in float64; ``None`` without both.

    ``order`` permutes the upstream gradients along their only axis of its length.
    """
    if found.trial is None:
        return None
    upstream = Upstream.of(found.trial, gradients.wanted(found.trial))
    if order is not None:
        for output, given in upstream.upstream.items():
            axes = [axis for axis, size in enumerate(given.shape) if size == len(order)]
            if len(axes) != 1:
                return None
            upstream.upstream[output] = given.index_select(axes[0], torch.tensor(order, device=given.device))
    try:
        right = upstream.lanes(1).get(name)
    except (NoGraph, ReferenceFailed):
        return None
    got = Attempt(found.trial, upstream, FILLS[0]).named().get(f"d{name}")
    return None if got is None or right is None else (got.detach(), right.oracle)


def right_of(context: Context, logical: Mapping[str, Any], *, seed: int = 0) -> dict[str, torch.Tensor] | None:
    """The reference's outputs by name for any values, rounded as it rounds; ``None`` where it raises."""
    try:
        with context.clock.phase("reference"):
            run = run_reference(context.spec, logical, context.extra, reader(context.spec), lanes=0, seed=seed)
    except (ReferenceFailed, SpecError):
        return None
    return {name: t.detach() for name, t in collect(run.result, run.arguments, context.spec.mutates).tensors.items()}
