"""Check `gradients`: what backward returns for the inputs named in ``grad=``, whatever the upstream gradient is.

Each case asks once, with a random upstream gradient (never all ones) in one of the layouts that callers produce:
contiguous, one element expanded (what ``sum().backward()`` sends), transposed, stepped, rows of a wider buffer whose
gaps hold NaN, a slice that begins anywhere; random, negative, zero or zero in some rows; for all outputs or one alone;
with all inputs that may require grad, or some of them. The reference's own backward, followed by the lanes, prices
every gradient. Inputs, upstream gradients and results keep their bits, forward is right while it records a graph, and
in some cases backward runs twice and under both fills. What autograd promises besides is asked of few cases by
`autograd`. Left out: cases with NaN, infinite or huge values, where the formula of a gradient decides about non-finite
elements.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pytest_fusion import interpreter
from pytest_fusion.case import counter_random, recorded_values, regimes
from pytest_fusion.checks import memory, values_check
from pytest_fusion.checks.check import Check
from pytest_fusion.checks.evidence import WrongGradient
from pytest_fusion.checks.gradients import autograd, blame
from pytest_fusion.checks.gradients.backward import NAME, Attempt, Backward, ended, named, wrong_results
from pytest_fusion.checks.gradients.upstream import KINDS, NoGraph, Upstream
from pytest_fusion.checks.invariance import sliced_gradients
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import SECOND, Verdict, failed, passed, unknown
from pytest_fusion.interpreter.control.executor import ordered
from pytest_fusion.oracle import OutputLanes, TooSlow
from pytest_fusion.oracle.reference import FEW_LANES, MANY_LANES, ReferenceFailed
from pytest_fusion.run.compiled import observe_compiled
from pytest_fusion.run.memory import FILLS
from pytest_fusion.spec.fusion_spec import FusionSpec

__all__ = ["NAME", "all_gradients", "compile_only", "due", "missing", "run", "wanted"]

# Values whose gradients depend on how a formula is written: 0 * inf, inf - inf.
_WILD = frozenset({"nan", "inf", "masked", "huge"})
# One case in so many asks for the same gradients twice, by retain_graph and under the other fill.
_TWICE_EVERY = 4
# What may be done where nobody asks for a second backward.
_ALONE = f"; where it is meant for one backward, let the next one raise, or declare without={{{SECOND!r}: 'reason'}}"
# One case in so many asks for a part of the gradients.
_PART_EVERY = 3
# Of four such cases two ask for one alone, the next for all but one, the last for any part.
_ALL_BUT_ONE = 2
# Up to so many inputs, every subset of them is equally likely.
_ENUMERATED = 6
# Fresh calls that must agree before a difference between two backwards is no chance.
_CHANCES = 6
# Cases whose backward runs with its programs in another order, where that can be chosen; how many more with many
# programs, by which a kernel may choose to add up in another way; and how many with one or two, where only lanes meet.
_MOST_ORDERS, _FEW_PROGRAMS, _MANY_PROGRAMS = {"few": 3, "some": 5, "many": 2}, 2, 64
# The identity of a gradient that is wrong in the first backward already: most of what is shrunk.
_WRONG = re.compile(r"gradients:\w+:(?:non)?finite")


@dataclass(slots=True)
class _State:
    """How many cases ran in another order, by their number of programs.

    Once something is ``found`` all cases are those of its shrinking.
    """

    orders: Counter[Literal["few", "some", "many"]] = field(default_factory=Counter)
    found: bool = False


def missing(spec: FusionSpec, device: torch.device) -> str | None:  # noqa: ARG001
    """Why there are no gradients to check without ``grad=``."""
    return None if spec.grad else "not requested: grad= is False"


def due(trial: Trial) -> bool:
    """Cases whose values are finite and whose reference can be differentiated."""
    case = trial.result.case
    wild = any(regimes.drawn(t.regime) in _WILD or recorded_values.special(t.regime) for t in case.tensors.values())
    return not wild and bool(wanted(trial))


def wanted(trial: Trial) -> list[str]:
    """The inputs that require grad in this case: all that ``grad=`` allows, in one case of three a part of them.

    What is absent (an optional bias) is not among them.
    """
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
    # Frozen weights, an adapter's bias: most often one alone requires grad, or all but one.
    kind, one = (
        counter_random.mix(case.seed, "subset kind") % 4,
        able[counter_random.mix(case.seed, "subset of one") % len(able)],
    )
    if kind < _ALL_BUT_ONE:
        return [one]
    if kind == _ALL_BUT_ONE:
        return [name for name in able if name != one]
    if len(able) <= _ENUMERATED:
        chosen = 1 + counter_random.mix(case.seed, "subset") % (2 ** len(able) - 2)
        return [name for i, name in enumerate(able) if chosen >> i & 1]
    return [name for name in able if counter_random.mix(case.seed, "subset", name) % 2] or able[:1]


def all_gradients(seed: int) -> bool:
    """Whether a case of this seed requires the gradients of all inputs, for a random upstream gradient."""
    kind = KINDS[counter_random.mix(seed, "upstream kind") % len(KINDS)]
    return kind == "random" and counter_random.mix(seed, "subset?") % _PART_EVERY != 0


def compile_only(trial: Trial) -> None:
    """Compile what a forward and a backward of the kernel launch, and run none of it.

    Raises what the reference raises.
    """
    upstream = Upstream.of(trial, wanted(trial))
    upstream.settle()
    with observe_compiled(lambda _: None, launch=False):
        Attempt(trial, upstream, FILLS[0])


def run(trial: Trial) -> Verdict:
    """Forward and backward of kernel and reference, compared."""
    verdict = _run(trial)
    if verdict.failed and verdict.check != sliced_gradients.NAME:
        trial.context.state(_State).found = True
    return verdict


def _run(trial: Trial) -> Verdict:
    upstream = Upstream.of(trial, wanted(trial))
    # What may be overwritten is there for one backward, and for no other use.
    once = any(name in trial.spec.clobbers for name in upstream.wanted)
    turn = not once and counter_random.mix(trial.result.case.seed, "twice") % _TWICE_EVERY == 0
    twice = turn and trial.context.on(SECOND)
    try:
        upstream.settle()
        # Before the reference's gradients exist: a backward that looks for them among live or freed objects finds none.
        first = Attempt(trial, upstream, FILLS[0], twice=twice)
        few = upstream.lanes(FEW_LANES)
    except NoGraph:
        return unknown(NAME, "the reference's outputs do not depend on the inputs in a way that autograd knows")
    except ReferenceFailed as error:
        if isinstance(error.__cause__, TooSlow):
            raise  # the judge rejects the case
        return unknown(NAME, f"the reference cannot be differentiated here: {error}")
    if (verdict := _of_first(trial, upstream, first, few)) is not None:
        return verdict
    seen: dict[str, Any] = {}
    if (trial.context.focus.sought or "").startswith(sliced_gradients.NAME):
        verdict = _in_company(trial, upstream, first)
    # Six further backwards would run on every case that is too small to show the failure that is sought.
    elif not _WRONG.fullmatch(trial.context.focus.sought or ""):
        verdict, seen = _further(trial, upstream, first, turn=turn, once=once, twice=twice)
    return verdict or passed(NAME, upstream=upstream.kind, wanted=upstream.wanted, **seen)


def _further(
    trial: Trial, upstream: Upstream, first: Attempt, *, turn: bool, once: bool, twice: bool
) -> tuple[Verdict | None, dict[str, Any]]:
    """The first failure of further backwards, and what the promises of autograd came to. ``first`` was right."""
    verdict = None
    again = not once and trial.context.on(SECOND)
    if first.backward is not None and first.backward.saved and not twice and again:
        # What backward keeps for itself it may use up, if a second one is then refused or right all the same.
        first, turn = Attempt(trial, upstream, FILLS[0], twice=True), True
        verdict = _ended(trial, first)
    if turn and verdict is None:
        # Chance first: what varies from call to call says nothing about a graph that is used twice.
        verdict = _other_fill(trial, upstream, first) or _second_backward(trial, upstream, first)
    found = trial.context.state(_State).found
    verdict = verdict or _in_other_order(trial, upstream, first, always=found)
    seen: dict[str, Any] = {}
    if verdict is None and not once and autograd.due(trial, always=found):
        verdict, seen = autograd.examined(trial, upstream, first)
    return verdict or _in_company(trial, upstream, first), seen


def _of_first(trial: Trial, upstream: Upstream, first: Attempt, few: Mapping[str, OutputLanes]) -> Verdict | None:
    """The failure that the first backward shows by itself."""
    if (verdict := _ended(trial, first)) is not None:
        return blame.of_access(trial, upstream, verdict, _judging(trial))
    if (verdict := _forward(trial, first)) is not None:
        return verdict
    assert first.backward is not None
    if (verdict := _compare(trial, upstream, first.backward, few)) is not None:
        return blame.explained(trial, upstream, first, verdict, _judging(trial))
    return _left_alone(trial, first.backward)


def _ended(trial: Trial, attempt: Attempt) -> Verdict | None:
    return ended(trial, attempt.outcome, attempt.placed, attempt.upstream, attempt.altered)


def _forward(trial: Trial, attempt: Attempt) -> Verdict | None:
    """Forward's results while it records a graph: the bits that they have without one, or right all the same."""
    steady = trial.steady(trial.got.tensors)
    varies = len(steady) < len(trial.got.tensors)
    if not varies and repeat.first_difference(steady, attempt.forward) is None:
        return None
    return wrong_results(trial, attempt.forward, "with inputs that require grad", "forward")


def _left_alone(trial: Trial, backward: Backward) -> Verdict | None:
    """What backward changed or set that was not its own."""
    for name, mask in backward.outputs.items():
        trial.result.differs = (name, mask)
        return failed(
            NAME,
            f"backward changed {int(mask.sum())} of {mask.numel()} element(s) of {name}, a result that forward had "
            "returned and its caller still holds",
            identity=f"gradients:output:{name}",
            cause="mutates-input",
            output=name,
        )
    for name in backward.direct:
        return failed(
            NAME,
            f"the kernel set {name}.grad or {name}.requires_grad by itself; backward returns gradients, and autograd "
            "stores or adds them where they belong",
            identity=f"gradients:extra:{name}",
        )
    return None


def _compare(trial: Trial, upstream: Upstream, backward: Backward, few: Mapping[str, OutputLanes]) -> Verdict | None:
    """Every gradient against the reference's; ``None`` where all agree."""
    for name in upstream.wanted:
        got = backward.gradients[name]
        if name not in few:
            if got is not None and bool((got != 0).any()):
                trial.result.differs = (f"d{name}", got.detach() != 0)
                return failed(
                    NAME,
                    f"{name} has a gradient though no output of the reference depends on it",
                    identity=f"gradients:extra:{name}",
                )
            continue
        native = upstream.native[name]
        if got is None:
            if not bool((native != 0).any()):
                continue
            return failed(
                NAME,
                f"no gradient came back for {name}, whose reference gradient is not zero",
                identity=f"gradients:missing:{name}",
                cause="gradient-missing",
            )
        if got.shape != native.shape or got.dtype != native.dtype:
            return failed(
                NAME,
                f"the gradient of {name} is {tuple(got.shape)} {got.dtype}, the reference's {tuple(native.shape)} "
                f"{native.dtype}",
                identity=f"gradients:structure:{name}",
            )
        with trial.context.clock.phase("judge"):
            judged = values_check.judge_one(
                got.detach(),
                native,
                few[name],
                lambda name=name: upstream.lanes(MANY_LANES)[name],  # type: ignore[misc]
                trial.spec.tolerance,
                wide=(lambda name=name: upstream.lanes(MANY_LANES, "F")[name]) if trial.narrow else None,  # type: ignore[misc]
            )
        if not judged.ok:
            trial.result.evidence = (f"d{name}", got.detach(), judged.by or native)
            kind = "nonfinite" if judged.statistic == "nonfinite" else "finite"
            return failed(
                NAME,
                f"gradient of {name}: {judged.reason}",
                identity=f"gradients:{name}:{kind}",
                statistical=judged.statistical,
                output=f"d{name}",
                evidence=WrongGradient(
                    deviation=values_check.deviation(judged),
                    upstream=upstream.kind,
                    layouts={used: upstream.layout[used].kind for used in upstream.used},
                    upstream_strides={used: upstream.strides(used) for used in upstream.used},
                    wanted=list(upstream.wanted),
                    ratio_to_right=blame.constant_ratio(got, few[name].oracle),
                ),
            )
    return None


def _judging(trial: Trial) -> blame.Right:
    """Whether an attempt's gradients are right, for upstream gradients that may be others than the case's."""

    def right(attempt: Attempt, upstream: Upstream) -> bool | None:
        if attempt.backward is None or _ended(trial, attempt) is not None:
            return None
        evidence, differs = trial.result.evidence, trial.result.differs
        try:
            return _compare(trial, upstream, attempt.backward, upstream.lanes(FEW_LANES)) is None
        except (NoGraph, ReferenceFailed):
            return None
        finally:
            trial.result.evidence, trial.result.differs = evidence, differs

    return right


def _second_backward(trial: Trial, upstream: Upstream, first: Attempt) -> Verdict | None:
    """The same gradients from a second backward through a retained graph, and the first ones still there."""
    backward = first.backward
    if backward is None or backward.again is None:
        return None
    before, after = trial.steady(first.named()), named(backward.again)
    difference = repeat.first_difference(before, after)
    names = f" ({', '.join(backward.saved)})" if backward.saved else ""
    if difference is not None:
        name, mask = difference
        if (chance := _chance(trial, upstream, before)) is not None:
            return chance
        trial.result.differs = difference
        return failed(
            NAME,
            f"a second backward through the retained graph gives another {name} in {int(mask.sum())} of "
            f"{mask.numel()} element(s): the first one overwrote what it had saved{names}{_ALONE}",
            identity=f"gradients:again:{name}",
            cause="mutates-input",
        )
    for name, mask in backward.overwritten.items():
        trial.result.differs = (f"d{name}", mask)
        return failed(
            NAME,
            f"a second backward changed {int(mask.sum())} of {mask.numel()} element(s) of the d{name} that the first "
            f"one had returned: both are one buffer{names}{_ALONE}",
            identity=f"gradients:overwritten:{name}",
            cause="mutates-input",
        )
    return None


def _chance(trial: Trial, upstream: Upstream, before: Mapping[str, torch.Tensor]) -> Verdict | None:
    """What fresh calls show of gradients that differed once: chance if they differ again."""
    for _ in range(_CHANCES):
        fresh = Attempt(trial, upstream, FILLS[0])
        if fresh.backward is None:
            return _ended(trial, fresh)
        varied = repeat.variations(before, [fresh.named()])
        if varied:
            return repeat.varies(varied, "from one backward to the next")
    return None


def _other_fill(trial: Trial, upstream: Upstream, first: Attempt) -> Verdict | None:
    """The same gradients with other bytes around the inputs and in fresh memory."""
    before = trial.steady(first.named())
    other = Attempt(trial, upstream, FILLS[1])
    if other.backward is None:
        return _ended(trial, other)
    difference = repeat.first_difference(before, other.named())
    if difference is None:
        return None
    if (chance := _chance(trial, upstream, before)) is not None:
        return chance
    name, mask = trial.result.differs = difference
    if lines := memory.undefined_lanes(lambda fill: trial.steady(Attempt(trial, upstream, fill).named())):
        return memory.depends_on_undefined(name, mask, lines)
    return failed(
        "bounds",
        f"{int(mask.sum())} of {mask.numel()} element(s) of {name} depend on what is around the inputs or in fresh "
        f"memory{memory.read_at(other.outcome, scratch=True) or memory.read_at(other.outcome, scratch=False)}",
        identity=f"bounds:{name}",
        output=name,
    )


def _in_other_order(trial: Trial, upstream: Upstream, first: Attempt, *, always: bool) -> Verdict | None:
    """The same gradients when programs run in another order, where this process chooses it; see `repetition`."""
    context = trial.context
    before = trial.steady(first.named())
    if context.device.type != "cpu" or not interpreter.installed() or not before or not context.on("repeat"):
        return None
    programs = max((launch.programs for launch in first.outcome.launches), default=0)
    if not programs or upstream.kind == "zero":
        return None
    kind: Literal["few", "some", "many"] = "many" if programs > _MANY_PROGRAMS else "some"
    kind = "few" if programs <= _FEW_PROGRAMS else kind
    orders = context.state(_State).orders
    if not (always or context.deep or context.complete or orders[kind] < _MOST_ORDERS[kind]):
        return None
    orders[kind] += 1
    with context.clock.check("repeat"):
        with ordered("reversed"):
            turned = Attempt(trial, upstream, FILLS[0])
        # Programs that wait for those before them cannot be turned round.
        varied = repeat.variations(before, [turned.named()]) if turned.backward is not None else []
        if not varied:
            return None
        return _chance(trial, upstream, before) or repeat.varies(
            varied,
            "when the programs of a launch, or the lanes of one, run in another order, which a GPU chooses as it "
            f"likes: {repeat.ORDERED}",
            order="reversed",
        )


def _in_company(trial: Trial, upstream: Upstream, first: Attempt) -> Verdict | None:
    """The failure of gradients that depend on other slices; what is no failure is noted for `invariance`."""
    if not sliced_gradients.due(trial, upstream):
        return None
    verdict = sliced_gradients.judged(trial, upstream, first)
    if verdict is not None and not verdict.failed:
        trial.note(verdict)
        return None
    return verdict


CHECK = Check(NAME, run, due=due, missing=missing, notes=autograd.notes, parts=("second",))
