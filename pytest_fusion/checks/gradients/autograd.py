"""The part of check `gradients` that needs more calls: autograd's promises besides the gradients themselves.

Few cases have these further calls: the same results under ``no_grad`` and ``inference_mode``, and no graph there; and
second derivatives that are right or refused. A kernel that trains by one algorithm and infers by another may give other
bits, never wrong results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pytest_fusion.case import counter_random
from pytest_fusion.checks import memory
from pytest_fusion.checks.context import IN_PLACE, call_placed, collect, error_verdict, rejection
from pytest_fusion.checks.gradients.backward import NAME, Attempt, connected, prepared, wrong_results
from pytest_fusion.checks.gradients.upstream import NoGraph, Upstream
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import SECOND, Verdict, failed, hazard
from pytest_fusion.oracle import OutputLanes
from pytest_fusion.oracle.reference import ReferenceFailed, copies, takes
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.placing import place

# Three calls a case; what they find does not depend on sizes or values.
_MOST_CASES, _MOST_CASES_DEEP = 3, 20
_MODES: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
# A second derivative without one of its terms is off by about its own size; a complete one in float32 by less than a
# thousandth. The lanes know few of its operations, so no finer error is judged.
_WRONG, _PRECISE, _NOTHING = 0.25, 0.01, 1e-6

Second = Literal["right", "refused", "missing", "wrong", "not judged"]


@dataclass(slots=True)
class _State:
    """The number of examined cases."""

    cases: int = 0


def due(trial: Trial, *, always: bool) -> bool:
    """A few thorough cases; every case while a finding shrinks or a case is replayed."""
    context = trial.context
    most = _MOST_CASES_DEEP if context.deep else _MOST_CASES
    return always or context.complete or (trial.thorough and context.state(_State).cases < most)


def examined(trial: Trial, upstream: Upstream, first: Attempt, seen: dict[str, Any]) -> Iterator[Verdict]:
    """The broken promises; ``seen`` gets the results of the others. ``first`` has shown right gradients."""
    trial.context.state(_State).cases += 1
    for mode in _MODES:
        verdict, seen[mode] = _under(mode, trial, upstream)
        if verdict is not None:
            yield verdict
    seen["second_derivative"] = "not judged"
    used_up = first.backward is not None and first.backward.saved and not trial.context.on(SECOND)
    if not used_up:  # a second derivative uses the graph of the first again
        verdict, seen["second_derivative"] = _second_derivative(trial, upstream)
        if verdict is not None:
            yield verdict


def _under(mode: str, trial: Trial, upstream: Upstream) -> tuple[Verdict | None, str]:
    """The forward call in this mode, with inputs that require grad: right, and without a graph."""
    spec, context = trial.spec, trial.context
    with context.clock.phase("make"):
        placed = place(trial.logical, trial.result.case, context.device, FILLS[0])
        for name in upstream.wanted:
            placed.arguments[name].requires_grad_(True)
        placed.arena.snapshot()

    def call(**arguments: Any) -> Any:
        with _MODES[mode]():
            return spec.fused(**arguments)

    outcome = call_placed(context, call, placed)
    when = f"under torch.{mode}()"
    error = outcome.error
    if error is not None:
        if rejection(spec, error) is not None or _of_reference(mode, trial, upstream) is None:
            return None, "refused"
        plain = error_verdict(outcome)
        trial.result.trace = outcome.trace
        return failed(
            "error", f"{when}, {plain.reason}", identity=f"{plain.identity}:{mode}", evidence=plain.evidence
        ), ""
    for broken in (
        memory.check_damage(outcome.damage),
        memory.check_inputs(
            placed.arena.changed(),
            spec.given_up,
            lambda _: memory.Call(mode, f"{when}, with inputs that require grad, the kernel"),
        ),
    ):
        if broken.failed:
            return broken, ""
    results = trial.collect(outcome, placed).tensors
    for name, t in results.items():
        # An input itself requires grad in any mode.
        given = t.grad_fn is None and any(t.data_ptr() == placed.arguments[one].data_ptr() for one in upstream.wanted)
        if given or not t.requires_grad or name.endswith(IN_PLACE):
            continue
        theirs = _of_reference(mode, trial, upstream)
        if theirs is None or (name in theirs and theirs[name].requires_grad):
            continue
        return failed(
            NAME,
            f"{when}, {name} requires grad all the same: the kernel switches gradients on by itself, and whoever keeps "
            "the result keeps its graph",
            identity=f"gradients:{mode}:graph",
        ), ""
    with torch.no_grad():
        plain_results = {name: t.detach() for name, t in results.items()}
        if repeat.first_difference(trial.steady(trial.got.tensors), plain_results) is None:
            return None, "same bits"
        return wrong_results(trial, plain_results, when, mode), "other bits"


def _of_reference(mode: str, trial: Trial, upstream: Upstream) -> dict[str, torch.Tensor] | None:
    """The reference's results in this mode; ``None`` where it raises."""
    arguments = copies(trial.logical, upstream.wanted)
    spec = trial.spec
    try:
        with trial.context.clock.phase("reference"), _MODES[mode]():
            result = spec.reference(**arguments, **takes(spec.reference, trial.context.extra))
    except Exception:  # noqa: BLE001 - a reference that needs a graph requires one of the kernel too
        return None
    return collect(result, arguments, spec.mutates).tensors


def _drawn(trial: Trial, what: str, name: str) -> torch.Tensor:
    like = trial.logical[name]
    assert isinstance(like, torch.Tensor)
    generator = torch.Generator(like.device)
    generator.manual_seed(counter_random.mix(trial.result.case.seed, what, name) >> 1)
    return torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)


def _second_derivative(trial: Trial, upstream: Upstream) -> tuple[Verdict | None, Second]:
    """The result of ``create_graph=True`` and a second backward: right, refused, or not connected to some input."""
    if not _may_be_judged(trial, upstream):
        return None, "not judged"
    spec, context, wanted = trial.spec, trial.context, upstream.wanted
    with context.clock.phase("make"):
        placed, above = prepared(trial, upstream, FILLS[0])
        of = {name: _drawn(trial, "second", name) for name in wanted}
    differentiated: list[str] = []
    found: dict[str, torch.Tensor | None] = {}

    def call(**arguments: Any) -> None:
        ends = connected(collect(spec.fused(**arguments), arguments, spec.mutates).tensors, above)
        leaves = [arguments[name] for name in wanted]
        given = [t.requires_grad_(True) for t in above.tensors.values()]
        gradients = torch.autograd.grad(ends, leaves, given, create_graph=True, allow_unused=True)
        once = {n: g for n, g in zip(wanted, gradients, strict=True) if g is not None and g.requires_grad}
        differentiated.extend(once)
        if once:
            # `grad` omits nodes that lead to no input, and the one that refuses is such a node.
            torch.autograd.backward(list(once.values()), [of[name] for name in once])
            found.update((name, arguments[name].grad) for name in wanted)

    outcome = call_placed(context, call, placed)
    if outcome.error is not None:
        return None, "refused"
    try:
        right = upstream.second({name: of[name] for name in differentiated or of})
    except (ReferenceFailed, NoGraph):
        return None, "not judged"
    return _judged_second(found, right)


def _may_be_judged(trial: Trial, upstream: Upstream) -> bool:
    """Whether a second derivative here is precise enough and not zero."""
    precise = all(trial.logical[name].dtype in (torch.float32, torch.float64) for name in upstream.wanted)
    plain = all(tensor.ordinary for tensor in trial.result.case.tensors.values())
    return precise and plain and upstream.kind != "zero"


def _judged_second(
    found: Mapping[str, torch.Tensor | None], right: Mapping[str, OutputLanes]
) -> tuple[Verdict | None, Second]:
    def lacking(reason: str, slug: str) -> Verdict:
        return hazard(NAME, "second-derivative", f"with create_graph=True {reason}", identity=f"{NAME}:second:{slug}")

    missing = ""
    for name, lanes in right.items():
        exact = lanes.oracle.double()
        size = float(exact.norm())
        got = found.get(name)
        if got is None:
            missing = missing or (name if size > _NOTHING else "")
            continue
        if not float((lanes.native.double() - exact).norm()) <= _PRECISE * size < float("inf"):
            continue
        off = float((got.detach().double() - exact).norm()) if got.shape == exact.shape else float("inf")
        # If the right one is zero, a wrong term has the size of the others.
        if not off <= _WRONG * max(size, 1.0 if size == 0 else 0.0):
            return lacking(
                f"the second derivative by {name} is off by {off:.3g}, of a right one of norm {size:.3g}: the graph of "
                "backward lacks a term, as of a tensor that was saved and is neither input nor output, or by detach(); "
                "or refuse with torch.autograd.function.once_differentiable",
                name,
            ), "wrong"
    if not missing:
        return None, "right"
    return lacking(
        f"backward returns gradients that are not connected to {missing}: a penalty on them trains nothing there; "
        "torch.autograd.function.once_differentiable makes that an error",
        "missing",
    ), "missing"
