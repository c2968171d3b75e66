"""The part of `invariance` for gradients: those of inputs that follow the dim keep each slice's bits too.

If an output's slice depends only on its own slice of an input, so does the gradient. So only outputs that follow the
dim get an upstream gradient, cut like the inputs, and only gradients of inputs that follow it are compared; those of
shared inputs, such as a weight, are sums over slices. Runs on cases whose gradients are right. Left out: gradients that
may vary by ``deterministic=``, and upstream gradients of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from pytest_fusion.case.layouts import of_fewer
from pytest_fusion.checks.gradients.backward import Attempt
from pytest_fusion.checks.gradients.upstream import Upstream
from pytest_fusion.checks.invariance import invariance
from pytest_fusion.checks.invariance.batches import NAME, Effort, InvarianceState, Spent, width
from pytest_fusion.checks.invariance.case_slices import Unsliceable, selected
from pytest_fusion.checks.invariance.neighbours import Along, Call, Called
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import GRADIENTS, Verdict
from pytest_fusion.run.memory import FILLS

__all__ = ["NAME", "due", "judged"]

# A forward and a backward cost three times a call.
_EFFORT = Effort(any_case=2, thorough=4, wide=2, calls=16)


def due(trial: Trial, upstream: Upstream) -> bool:
    """Few cases of a test; every case while a finding shrinks."""
    context, spec = trial.context, trial.spec
    if not (context.on(NAME) and context.on(GRADIENTS)) or upstream.kind == "zero":
        return False
    if invariance.missing(spec, context.device) is not None or not (context.focus.sought or NAME).startswith(NAME):
        return False
    so_far = _so_far(trial)
    return any(_EFFORT.due(so_far, trial, width(trial, dim)) for dim in invariance.dims_of(trial))


def judged(trial: Trial, upstream: Upstream, first: Attempt) -> Verdict | None:
    """The finding, or `unknown` with a reason; ``None`` where no gradient follows a dim. ``first`` was right."""
    along = partial(_along, trial, upstream, first)
    with trial.context.clock.check(NAME):
        return invariance.of_dims(trial, _so_far(trial), _EFFORT, along, {}, gradients=True)


def _along(
    trial: Trial, upstream: Upstream, first: Attempt, dim: str, calls: int, *, wide: bool
) -> tuple[Verdict | None, Along]:
    """The verdict on one dim, and its slices; no calls where no gradient follows it. ``wide`` as in `invariance`."""
    so_far = _so_far(trial)
    forward, came = Along(trial, dim, so_far, invariance.outputs), first.named()
    axes = {
        f"d{name}": axis
        for name, axis in forward.input_axes.items()
        if f"d{name}" in came and not trial.tolerates(f"d{name}")
    }
    if not axes:
        return None, forward
    followers = forward.followers(trial.got.tensors)
    given = {name: followers[name] for name in upstream.used if name in followers}
    if not given:
        return None, forward  # the gradient of a mean may depend on their number

    def called_with(upstream: Upstream) -> Call:
        return lambda trial, slices: _gradients(trial, _cut(upstream, given, slices), slices, axes)

    many, gradients = trial, called_with(upstream)
    if wide:
        # For `MANY` slices of other values, of outputs that follow the dim.
        wider = _cut(upstream, given, [0] * invariance.MANY)
        fresh = {name: upstream.drawn(name, t) for name, t in wider.upstream.items()}
        others = called_with(replace(wider, upstream=fresh))
        many = invariance.of_many(trial, dim, so_far, others)
        gradients = gradients if many is trial else others
    along = Along(many, dim, so_far, gradients, gradients=True)
    return along.judge(calls, axes), along


def _gradients(trial: Trial, upstream: Upstream, slices: Sequence[int], axes: Mapping[str, int]) -> Called | None:
    """The compared gradients of a forward and a backward; see `neighbours.Call`."""
    attempt = Attempt(trial, upstream, FILLS[0])
    outcome = attempt.outcome
    if invariance.refused(trial, outcome, [*outcome.damage, *attempt.upstream.arena.damage()], slices):
        return None
    found = {name: t.detach().clone() for name, t in attempt.named().items() if name in axes}
    if found.keys() != axes.keys():
        raise Unsliceable(f"no gradient came back for {', '.join(sorted(axes.keys() - found.keys()))}")
    return Called(found, outcome.launches)


def _cut(upstream: Upstream, axes: Mapping[str, int], slices: Sequence[int]) -> Upstream:
    """The upstream gradients of these slices, in their layouts; none for outputs that do not follow the dim."""
    cut = {name: _taken(upstream, name, axis, slices) for name, axis in axes.items()}
    shapes = {name: tuple(upstream.upstream[name].shape) for name in axes}
    lying = {name: of_fewer(shapes[name], upstream.layout[name], axis, len(slices)) for name, axis in axes.items()}
    return replace(upstream, used=list(axes), upstream=cut, layout={**upstream.layout, **lying})


def _taken(upstream: Upstream, name: str, axis: int, slices: Sequence[int]) -> torch.Tensor:
    given = upstream.upstream[name]
    if upstream.layout[name].kind != "expanded":
        return selected(given, axis, slices)
    shape = [len(slices) if i == axis else size for i, size in enumerate(given.shape)]
    return given.as_strided(shape, [0] * len(shape))  # one element of storage


def _so_far(trial: Trial) -> Spent:
    return trial.context.state(InvarianceState).gradients
