"""Further backwards of a case with right gradients: other fresh memory, a retained graph, another order of programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pytest_fusion import interpreter
from pytest_fusion.checks import memory
from pytest_fusion.checks.context import call_placed, collect
from pytest_fusion.checks.gradients.backward import NAME, Attempt, connected, named, prepared
from pytest_fusion.checks.gradients.compared import compare
from pytest_fusion.checks.gradients.upstream import Upstream
from pytest_fusion.checks.kernels import undefined
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import SECOND, Verdict, failed, hazard
from pytest_fusion.interpreter.control.executor import ordered
from pytest_fusion.interpreter.memory.undefined_lanes import masked_fill
from pytest_fusion.oracle.reference import FEW_LANES
from pytest_fusion.run.memory import FILLS
from pytest_fusion.spec.fusion_spec import UPSTREAM

# Fresh calls that must agree before a difference between two backwards is no chance.
_CHANCES = 6
# Cases whose backward runs with its programs in another order: with several; with many, where a kernel may add up in
# another way; and with one or two, where only lanes meet.
_MOST_ORDERS, _FEW_PROGRAMS, _MANY_PROGRAMS = {"few": 3, "some": 5, "many": 2}, 2, 64
# What to do where no caller needs a second backward.
_ALONE = f"; where it is meant for one backward, let the next one raise, or declare without={{{SECOND!r}: 'reason'}}"


@dataclass(slots=True)
class _State:
    """How many cases ran in another order, by number of programs."""

    orders: Counter[Literal["few", "some", "many"]] = field(default_factory=Counter)


def upstream_overwritten(trial: Trial, upstream: Upstream, first: Attempt) -> Verdict | None:
    """The verdict on writes to the upstream gradient: a failure where a residual graph comes out wrong."""
    change = next(iter(first.backward.upstream), None) if first.backward is not None else None
    if change is None or trial.spec.gives_up_upstream:
        return None
    name = change.name
    found = (
        f"backward changed {change.count} element(s) of the upstream gradient of {name}, the first at "
        f"{list(change.first)}"
    )
    advice = f"write into a copy, or declare clobbers={UPSTREAM!r} where no other branch has it"
    if (wrong := _residual(trial, upstream).get(name)) is None:
        return hazard(
            NAME,
            "upstream-overwritten",
            f"{found}, which autograd may hand to other branches of the graph too; {advice}",
            output=name,
        )
    trial.result.differs = (f"upstream gradient of {name}", wrong)
    return failed(
        NAME,
        f"{found}: of `{name} + z` the gradient of z is wrong in {int(wrong.sum())} of {wrong.numel()} element(s), as "
        f"autograd hands the same tensor to both; {advice}",
        identity=f"{NAME}:upstream:{name}",
        cause="upstream-overwritten",
        because=f"a residual graph, {name} + z, gives a wrong gradient for z",
    )


def _residual(trial: Trial, upstream: Upstream) -> dict[str, torch.Tensor]:
    """Wrong elements of the gradient of ``z`` where each result goes into ``result + z``."""
    # ``z`` is made before the call, like a residual, so that its backward runs after the kernel's.
    with trial.context.clock.phase("make"):
        placed, above = prepared(trial, upstream, FILLS[0])
        leaves = {name: torch.zeros_like(trial.expected.tensors[name]).requires_grad_(True) for name in upstream.used}
        others = {name: leaf.clone() for name, leaf in leaves.items()}
    found: list[torch.Tensor] = []

    def call(**arguments: Any) -> None:
        ends = connected(collect(trial.spec.fused(**arguments), arguments, trial.spec.mutates).tensors, above)
        sums = [end + others[name] for end, name in zip(ends, above.tensors, strict=True)]
        wanted = [arguments[name] for name in upstream.wanted if arguments[name].requires_grad]
        given = list(above.tensors.values())
        found.extend(torch.autograd.grad(sums, [*leaves.values(), *wanted], given, allow_unused=True))

    if call_placed(trial.context, call, placed).error is not None:
        return {}
    return repeat.changed(dict(zip(leaves, found, strict=False)), upstream.upstream)


def repeated(trial: Trial, upstream: Upstream, first: Attempt) -> Verdict | None:
    """What differs under another fill, or else in a second backward; chance is no evidence of either."""
    return _other_fill(trial, upstream, first) or _second_backward(trial, upstream, first)


def _second_backward(trial: Trial, upstream: Upstream, first: Attempt) -> Verdict | None:
    """Compare a second backward through a retained graph, and check that it leaves the first gradients unchanged."""
    backward = first.backward
    if backward is None or backward.again is None:
        return None
    before = trial.steady(first.named())
    again = repeat.first_difference(before, named(backward.again))
    if again is not None and (chance := chance_of(trial, upstream, before)) is not None:
        return chance
    for name, mask in [again] if again is not None else backward.overwritten.items():
        trial.result.differs = (name, mask)
        count, saved = f"{int(mask.sum())} of {mask.numel()} element(s)", ", ".join(backward.saved)
        found, why = (
            (f"gives another {name} in {count}", "the first one overwrote what it had saved")
            if again is not None
            else (f"changed {count} of the {name} that the first one had returned", "both are one buffer")
        )
        return hazard(
            NAME,
            "second-backward",
            f"a second backward through the retained graph {found}: {why}{f' ({saved})' if saved else ''}{_ALONE}",
            identity=f"{NAME}:{'again' if again is not None else 'overwritten'}:{name}",
            output=name,
        )
    return None


def chance_of(trial: Trial, upstream: Upstream, before: Mapping[str, torch.Tensor]) -> Verdict | None:
    """The verdict on gradients that differed once: chance if fresh calls differ too."""
    for _ in range(_CHANCES):
        fresh = Attempt(trial, upstream, FILLS[0])
        if fresh.backward is None:
            return fresh.ended()
        varied = repeat.variations(before, [fresh.named()])
        if varied:
            return repeat.varies(varied, "from one backward to the next")
    return None


def _other_fill(trial: Trial, upstream: Upstream, first: Attempt) -> Verdict | None:
    """Compare gradients with other bytes around the inputs and in fresh memory."""
    before = trial.steady(first.named())
    with masked_fill("poison"):
        other = Attempt(trial, upstream, FILLS[1])
    lines = first.outcome.undefined
    if lines and (other.ended() or repeat.first_difference(before, other.named())):
        found = undefined.dependence(trial.context, lines, lambda: Attempt(trial, upstream, FILLS[0]).results())
        if found is not None:
            trial.note(found)
        other = Attempt(trial, upstream, FILLS[1])
    if other.backward is None:
        return other.ended()
    difference = repeat.first_difference(before, other.named())
    if difference is None:
        return None
    if (chance := chance_of(trial, upstream, before)) is not None:
        return chance
    name, mask = trial.result.differs = difference
    return failed(
        "bounds",
        f"{int(mask.sum())} of {mask.numel()} element(s) of {name} depend on what is around the inputs or in fresh "
        f"memory{memory.read_at(other.outcome, scratch=True) or memory.read_at(other.outcome, scratch=False)}",
        identity=f"bounds:{name}",
        output=name,
    )


def in_other_order(trial: Trial, upstream: Upstream, first: Attempt, *, always: bool) -> Verdict | None:
    """Compare gradients with programs in another order, where this process chooses it; see `repetition`."""
    context = trial.context
    before = trial.steady(first.named())
    if context.device.type != "cpu" or not interpreter.installed() or not context.on("repeat"):
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
        # Programs that wait for earlier ones cannot be reversed.
        if turned.backward is None:
            return None
        varied = repeat.variations(before, [turned.named()])
        if not varied and len(before) == len(first.named()):
            return None
        if not varied:
            found = compare(trial, upstream, turned.backward, upstream.lanes(FEW_LANES))
            wrong = next((each for each in found if each.failed), None)
            return wrong and repeat.varies_wrongly(wrong, "with the programs in another order (the last one first)")
        return chance_of(trial, upstream, before) or repeat.varies(
            varied,
            "when the programs of a launch, or the lanes of one, run in another order, which a GPU chooses as it "
            f"likes: {repeat.ORDERED}",
            order="reversed",
        )
