"""Check `gradients`: what backward returns for the inputs named in ``grad=``, for any upstream gradient.

Each case has a random upstream gradient (never all ones) in a layout that callers produce: contiguous, one expanded
element (``sum().backward()``), transposed, stepped, rows of a wider buffer with NaN in its gaps, a slice with an
offset; random, negative, zero or zero in some rows; for all outputs or one; with all inputs that may require grad, or
some. The reference's own backward, followed by the lanes, prices every gradient. Inputs, upstream gradients and results
must keep their bits, and forward must be right while it records a graph. In some cases backward runs twice and under
both fills; `autograd` tests further promises on a few. Left out: cases with NaN, infinite or huge values, where the
formula of a gradient decides about non-finite elements.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from pytest_fusion.case import counter_random, recorded_values, regimes
from pytest_fusion.checks.check import Check
from pytest_fusion.checks.gradients import autograd, blame, further
from pytest_fusion.checks.gradients.backward import NAME, Attempt, Backward, wrong_results
from pytest_fusion.checks.gradients.compared import compare, judging
from pytest_fusion.checks.gradients.upstream import KINDS, NoGraph, Upstream
from pytest_fusion.checks.invariance import sliced_gradients
from pytest_fusion.checks.kernels import refused
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import SECOND, Verdict, failed, passed, unknown
from pytest_fusion.oracle import OutputLanes, TooSlow
from pytest_fusion.oracle.reference import FEW_LANES, ReferenceFailed
from pytest_fusion.run.compiled import observe_compiled
from pytest_fusion.run.memory import FILLS
from pytest_fusion.spec.fusion_spec import FusionSpec

__all__ = ["NAME", "all_gradients", "compile_only", "due", "missing", "run", "wanted"]

# Values whose gradients depend on how a formula is written: 0 * inf, inf - inf.
_WILD = frozenset({"nan", "inf", "masked", "huge"})
# One case in four runs the same gradients twice, by retain_graph and under the other fill.
_TWICE_EVERY = 4
# One case in three requires a part of the gradients.
_PART_EVERY = 3
# Of four of these, two require a single gradient, the next all but one, the last any part.
_ALL_BUT_ONE = 2
# For up to so many inputs every subset is equally likely.
_ENUMERATED = 6
# The identity of a gradient that is wrong in the first backward: most of what shrinks.
_WRONG = re.compile(r"gradients:(?:\w+:(?:non)?finite|less-accurate:\w+)")
# The beginnings of identities of findings by further backwards.
_UPSTREAM, _SECOND, _AGAIN = "gradients:upstream", "gradients:second", ("gradients:again", "gradients:overwritten")
_FURTHER = (_UPSTREAM, _SECOND, *_AGAIN, sliced_gradients.NAME)


def missing(spec: FusionSpec, device: torch.device) -> str | None:  # noqa: ARG001
    """Why there are no gradients to check without ``grad=``."""
    return None if spec.grad else "not requested: grad= is False"


def due(trial: Trial) -> bool:
    """Cases whose values are finite and whose reference can be differentiated."""
    case = trial.result.case
    wild = any(regimes.drawn(t.regime) in _WILD or recorded_values.special(t.regime) for t in case.tensors.values())
    return not wild and bool(wanted(trial))


def wanted(trial: Trial) -> list[str]:
    """The present inputs that require grad: all that ``grad=`` allows, in one case of three a part."""
    spec, case = trial.spec, trial.result.case
    among: Iterable[str] = trial.logical if spec.grad is True else spec.grad  # type: ignore[assignment]
    able = [
        name
        for name in among
        if isinstance(value := trial.logical.get(name), torch.Tensor)
        and value.dtype.is_floating_point
        and name not in spec.mutates
    ]
    if len(able) < 2 or counter_random.mix(case.seed, "subset?") % _PART_EVERY:
        return able
    # Frozen weights or an adapter's bias: usually one alone requires grad, or all but one.
    kind = counter_random.mix(case.seed, "subset kind") % 4
    one = able[counter_random.mix(case.seed, "subset of one") % len(able)]
    if kind < _ALL_BUT_ONE:
        return [one]
    if kind == _ALL_BUT_ONE:
        return [name for name in able if name != one]
    if len(able) <= _ENUMERATED:
        chosen = 1 + counter_random.mix(case.seed, "subset") % (2 ** len(able) - 2)
        return [name for i, name in enumerate(able) if chosen >> i & 1]
    return [name for name in able if counter_random.mix(case.seed, "subset", name) % 2] or able[:1]


def all_gradients(seed: int) -> bool:
    """Whether a case of this seed requires all gradients, for a random upstream gradient."""
    kind = KINDS[counter_random.mix(seed, "upstream kind") % len(KINDS)]
    return kind == "random" and counter_random.mix(seed, "subset?") % _PART_EVERY != 0


def compile_only(trial: Trial) -> None:
    """Compile what a forward and backward launch, without running it. Raises what the reference raises."""
    upstream = Upstream.of(trial, wanted(trial))
    upstream.settle()
    with observe_compiled(lambda _: None, launch=False):
        Attempt(trial, upstream, FILLS[0])


def run(trial: Trial) -> Verdict:
    """Compare forward and backward of kernel and reference: the first failure. Hazards are noted."""
    upstream = Upstream.of(trial, wanted(trial))
    try:
        upstream.settle()
        # Before the reference's gradients exist, so that a backward cannot find them among live or freed objects.
        first = Attempt(trial, upstream, FILLS[0], twice=_in_turn(trial, upstream) and _second_due(trial, upstream))
        few = upstream.lanes(FEW_LANES)
    except NoGraph:
        return unknown(NAME, "the reference's outputs do not depend on the inputs in a way that autograd knows")
    except ReferenceFailed as error:
        if isinstance(error.__cause__, TooSlow):
            raise  # the judge rejects the case
        return unknown(NAME, f"the reference cannot be differentiated here: {error}")
    seen: dict[str, Any] = {}
    for verdict in _found(trial, upstream, first, few, seen):
        # A verdict of `invariance` that does not fail the case is noted too.
        ends = verdict.failed or (verdict.status == "pass" and verdict.check == NAME)
        if ends and verdict.identity not in trial.result.known:
            return verdict
        trial.note(verdict)
    return passed(NAME, upstream=upstream.kind, wanted=upstream.wanted, **seen)


def _found(
    trial: Trial, upstream: Upstream, first: Attempt, few: Mapping[str, OutputLanes], seen: dict[str, Any]
) -> Iterator[Verdict]:
    """Every failure and hazard; ``seen`` gets the results of autograd's promises."""
    known, right = trial.result.known, True
    if (verdict := first.ended()) is not None:
        right = False
        yield verdict if verdict.identity in known else blame.of_access(trial, upstream, verdict, judging(trial))
        if first.backward is None or verdict.check != "inputs":
            return  # other errors may follow from it
    if (verdict := _forward(trial, first)) is not None:
        yield verdict
    assert first.backward is not None
    refused.trained(trial.context)
    for verdict in compare(trial, upstream, first.backward, few):
        right = right and not verdict.failed
        plain = verdict.identity in known or not verdict.failed
        yield verdict if plain else blame.explained(trial, upstream, first, verdict, judging(trial))
    yield from _left_alone(trial, first.backward)
    # Otherwise six further backwards would run on every case too small to show the failure.
    if right and not _WRONG.fullmatch(trial.context.focus.sought or ""):
        yield from _further(trial, upstream, first, seen)


def _further(trial: Trial, upstream: Upstream, first: Attempt, seen: dict[str, Any]) -> Iterator[Verdict]:
    """Findings of further backwards, each step unless another's finding is sought. ``first`` was right."""
    sought, known = trial.context.focus.sought, trial.result.known

    def due(*own: str) -> bool:
        return not (sought or "").startswith(_FURTHER) or (sought or "").startswith(own)

    if due(_UPSTREAM) and (sought or not any(each.startswith(_UPSTREAM) for each in known)):
        yield from filter(None, [further.upstream_overwritten(trial, upstream, first)])
    turn = _in_turn(trial, upstream)
    if first.backward is not None and first.backward.saved and not turn and _second_due(trial, upstream):
        # Backward may use up its own saved tensors if a second one is refused or right all the same.
        first, turn = Attempt(trial, upstream, FILLS[0], twice=True), True
        if (verdict := first.ended()) is not None:
            yield verdict
    if turn and due(*_AGAIN):
        yield from filter(None, [further.repeated(trial, upstream, first)])
    if due():
        yield from filter(None, [further.in_other_order(trial, upstream, first, always=sought is not None)])
    if due(_SECOND) and not _once(trial, upstream) and autograd.due(trial, always=sought is not None):
        yield from autograd.examined(trial, upstream, first, seen)
    if sliced_gradients.due(trial, upstream):
        yield from filter(None, [sliced_gradients.judged(trial, upstream, first)])


def _once(trial: Trial, upstream: Upstream) -> bool:
    """Whether an input may be overwritten, so that it serves only one backward."""
    return any(name in trial.spec.clobbers for name in upstream.wanted)


def _in_turn(trial: Trial, upstream: Upstream) -> bool:
    """Whether this case runs backward twice."""
    return not _once(trial, upstream) and counter_random.mix(trial.result.case.seed, "twice") % _TWICE_EVERY == 0


def _second_due(trial: Trial, upstream: Upstream) -> bool:
    """Whether a second backward through a retained graph must be right, and is not known to be wrong."""
    seen = trial.context.focus.sought is None and any(each.startswith(_AGAIN) for each in trial.result.known)
    return not (seen or _once(trial, upstream)) and trial.context.on(SECOND)


def _forward(trial: Trial, attempt: Attempt) -> Verdict | None:
    """Check forward's results while it records a graph: the same bits as without, or right in value."""
    steady = trial.steady(trial.got.tensors)
    varies = len(steady) < len(trial.got.tensors)
    if not varies and repeat.first_difference(steady, attempt.forward) is None:
        return None
    return wrong_results(trial, attempt.forward, "with inputs that require grad", "forward")


def _left_alone(trial: Trial, backward: Backward) -> Iterator[Verdict]:
    """Failures for what backward changed or set without owning it."""
    for name, mask in backward.outputs.items():
        trial.result.differs = (name, mask)
        yield failed(
            NAME,
            f"backward changed {int(mask.sum())} of {mask.numel()} element(s) of {name}, a result that forward had "
            "returned and its caller still holds",
            identity=f"gradients:output:{name}",
            cause="mutates-input",
            output=name,
        )
    for name in backward.direct:
        yield failed(
            NAME,
            f"the kernel set {name}.grad or {name}.requires_grad by itself; backward returns gradients, and autograd "
            "stores or adds them where they belong",
            identity=f"gradients:extra:{name}",
        )


CHECK = Check(NAME, run, due=due, missing=missing, parts=("second",))
