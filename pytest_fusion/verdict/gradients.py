"""Check `gradients`: what backward returns for the inputs named in ``grad=``, whatever the upstream gradient is.

Each case asks once, with a random upstream gradient (never all ones) in one of the layouts that callers produce:
contiguous, one element expanded (what ``sum().backward()`` sends), transposed, stepped, rows of a wider buffer, all
zeros. The reference's own backward, followed by the lanes, prices every gradient. Left out: cases with NaN, infinite
or huge values, where the formula of a gradient decides about non-finite elements, and second derivatives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_fusion.case import numbers
from pytest_fusion.case.layouts import choices
from pytest_fusion.case.model import Case, Layout, TensorCase
from pytest_fusion.run.fused import Outcome, run_fused
from pytest_fusion.run.lanes import OutputLanes
from pytest_fusion.run.lanes.shadow import run_lanes
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.place import Placed, place
from pytest_fusion.run.reference import FEW_LANES, MANY_LANES, ReferenceFailed, copies, takes
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.policy import Tolerance
from pytest_fusion.verdict import memory, repeat, values
from pytest_fusion.verdict.calls import error_verdict, rejection
from pytest_fusion.verdict.model import Verdict, failed, passed, unknown
from pytest_fusion.verdict.outputs import collect
from pytest_fusion.verdict.trial import Trial

NAME = "gradients"

# Values whose gradients depend on how a formula is written: 0 * inf, inf - inf.
_WILD = frozenset({"nan", "inf", "huge"})
_UPSTREAM = ("random", "random", "expanded", "zero")
_LAYOUTS = ("contiguous", "transposed", "step", "padded", "unflattenable")
# One case in so many asks for the same gradients twice, by retain_graph and under the other fill.
_TWICE_EVERY = 4
# Fresh calls that must agree before a difference between two backwards is no chance.
_CHANCES = 6
# A gradient that is the right one times a constant: how constant, and how far from 1.
_SAME_RATIO, _OTHER_RATIO = 0.02, 0.05


def missing(spec: FusionSpec, device: torch.device) -> str | None:  # noqa: ARG001
    """Without ``grad=`` nobody asks for gradients."""
    return None if spec.grad else "not asked for: grad= is False"


def due(trial: Trial) -> bool:
    """Cases whose values are finite and whose reference can be differentiated."""
    case = trial.result.case
    return not any(tensor.regime in _WILD for tensor in case.tensors.values()) and bool(_wanted(trial))


def _wanted(trial: Trial) -> list[str]:
    """The inputs that this case asks gradients for: all that ``grad=`` allows, in one case of three a part of them."""
    spec, case = trial.spec, trial.result.case
    named = list(trial.logical) if spec.grad is True else list(_names(spec.grad))
    taken = {*spec.mutates, *spec.clobbers}
    able = [
        name
        for name in named
        if isinstance(value := trial.logical.get(name), torch.Tensor)
        and value.dtype.is_floating_point
        and name not in taken
    ]
    if len(able) > 1 and numbers.mix(case.seed, "subset?") % 3 == 0:
        part = [name for name in able if numbers.mix(case.seed, "subset", name) % 2]
        return part or able[:1]
    return able


def _names(grad: Any) -> Sequence[str]:
    return (grad,) if isinstance(grad, str) else tuple(grad)


@dataclass(slots=True)
class _Backward:
    """One forward and backward: gradients by input name (``None`` where there is none), outputs that took part."""

    gradients: dict[str, torch.Tensor | None]
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    again: dict[str, torch.Tensor | None] | None = None


class _NoGraph(Exception):
    """An output that must be differentiable is not connected to any input; the message is its name."""


def run(trial: Trial) -> Verdict:
    """Forward and backward of kernel and reference, compared."""
    case, wanted = trial.result.case, _wanted(trial)
    try:
        reference = _Reference(trial, wanted)
        few = reference.lanes(FEW_LANES)
    except _NoGraph:
        return unknown(NAME, "the reference's outputs do not depend on the inputs in a way that autograd knows")
    except ReferenceFailed as error:
        return unknown(NAME, f"the reference cannot be differentiated here: {error}")
    kind = reference.kind
    twice = numbers.mix(case.seed, "twice") % _TWICE_EVERY == 0
    first = _Attempt(trial, reference, FILLS[0], twice=twice)
    verdict = _accept(trial, first)
    if verdict is not None:
        return verdict
    assert first.backward is not None
    verdict = _compare(trial, reference, first.backward, few)
    if verdict is not None:
        return _explained(trial, reference, verdict, few)
    if not twice:
        return passed(NAME, upstream=kind)
    # Chance first: what varies from call to call says nothing about a graph that is used twice.
    verdict = _other_fill(trial, reference, first) or _second_backward(trial, reference, first.backward)
    return verdict or passed(NAME, upstream=kind)


class _Reference:
    """The reference's backward, and the upstream gradients that both sides get."""

    def __init__(self, trial: Trial, wanted: Sequence[str]) -> None:
        self.trial, self.wanted = trial, list(wanted)
        seed = trial.result.case.seed
        self.kind = _UPSTREAM[numbers.mix(seed, "upstream kind") % len(_UPSTREAM)]
        floating = {n: t for n, t in trial.expected.tensors.items() if t.dtype.is_floating_point}
        # Made outside of the lanes, which would take the rounding of random numbers for the reference's own.
        self.upstream = {name: self._gradient(name, t) for name, t in floating.items()}
        self.layout = {name: self._layout(name, t) for name, t in floating.items()}
        self.used: list[str] = []
        self.present: list[str] = []
        self.native: dict[str, torch.Tensor] = {}

    def lanes(self, count: int) -> dict[str, OutputLanes]:
        """Lanes of every gradient that the reference has; with a fixed tolerance only its native values count."""
        trial = self.trial
        fixed = isinstance(trial.spec.tolerance, Tolerance)
        seed = numbers.mix(trial.result.case.seed, "gradient lanes", count)
        with trial.bench.clock.phase("reference"):
            run = run_lanes(self._call, lanes=1 if fixed else count, kind="E", seed=seed)
        self.native = {name: lanes.native for name, lanes in zip(self.present, run.outputs, strict=True)}
        return dict(zip(self.present, run.outputs, strict=True))

    def _call(self) -> list[torch.Tensor]:
        spec, bench = self.trial.spec, self.trial.bench
        arguments = copies(self.trial.logical)
        for name in self.wanted:
            arguments[name] = arguments[name].detach().requires_grad_(True)
        try:
            result = spec.reference(**arguments, **takes(spec.reference, bench.extra))
            outputs = _differentiable(collect(result, arguments, spec.mutates).tensors)
            if not outputs:
                raise _NoGraph
            self.used = list(outputs)
            given = [self.upstream[name] for name in outputs]
            leaves = [arguments[name] for name in self.wanted]
            found = torch.autograd.grad(list(outputs.values()), leaves, given, allow_unused=True)
        except _NoGraph:
            raise
        except Exception as error:
            raise ReferenceFailed(f"{type(error).__name__}: {error}") from error
        named = dict(zip(self.wanted, found, strict=True))
        self.present = [name for name, gradient in named.items() if gradient is not None]
        return [gradient for gradient in named.values() if gradient is not None]

    def _gradient(self, name: str, output: torch.Tensor) -> torch.Tensor:
        device, dtype = output.device, output.dtype
        generator = torch.Generator(device)
        generator.manual_seed(numbers.mix(self.trial.result.case.seed, "upstream", name) >> 1)
        if self.kind == "zero":
            return torch.zeros(output.shape, dtype=dtype, device=device)
        if self.kind == "expanded":
            return torch.randn((), generator=generator, device=device).to(dtype).expand(output.shape)
        return torch.randn(output.shape, generator=generator, device=device).to(dtype)

    def _layout(self, name: str, output: torch.Tensor) -> Layout:
        if self.kind == "expanded" and output.dim():
            return Layout("expanded")
        allowed = choices(_LAYOUTS, output.dim())
        kind, variant = allowed[numbers.mix(self.trial.result.case.seed, "upstream layout", name) % len(allowed)]
        return Layout(kind, variant)


def _differentiable(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t for name, t in outputs.items() if t.dtype.is_floating_point and t.requires_grad}


class _Attempt:
    """One forward and backward of the kernel in guarded memory."""

    def __init__(
        self, trial: Trial, reference: _Reference, fill: str, *, twice: bool = False, contiguous: bool = False
    ) -> None:
        case, bench = trial.result.case, trial.bench
        with bench.clock.phase("make"):
            self.placed = place(trial.logical, case, bench.device, fill)
            self.upstream = _placed_upstream(reference, case, bench.device, fill, contiguous=contiguous)
            for name in reference.wanted:
                self.placed.arguments[name].requires_grad_(True)
            self.placed.arena.snapshot()
            self.upstream.arena.snapshot()
        self._trial, self._reference, self._twice = trial, reference, twice
        self.backward: _Backward | None = None
        with bench.clock.phase("fused"):
            self.outcome: Outcome = run_fused(self._call, self.placed, bench.extra, programs=bench.programs)

    def _call(self, **arguments: Any) -> None:
        spec = self._trial.spec
        result = spec.fused(**arguments)
        outputs = collect(result, arguments, spec.mutates).tensors
        given = self.upstream.tensors
        for name in given:
            if name not in outputs or not outputs[name].requires_grad:
                raise _NoGraph(name)
        ends = [outputs[name] for name in given]
        leaves = [self.placed.arguments[name] for name in self._reference.wanted]

        def backward(*, keep: bool) -> dict[str, torch.Tensor | None]:
            found = torch.autograd.grad(ends, leaves, list(given.values()), allow_unused=True, retain_graph=keep)
            return dict(zip(self._reference.wanted, found, strict=True))

        self.backward = _Backward(backward(keep=self._twice), dict(zip(given, ends, strict=True)))
        if self._twice:
            kept = {n: g.clone() if g is not None else None for n, g in self.backward.gradients.items()}
            try:
                self.backward.again = backward(keep=False)
            except RuntimeError:
                return  # a clear refusal of a second backward is an answer
            self.backward.gradients, self.backward.again = kept, self.backward.again


def _placed_upstream(reference: _Reference, case: Case, device: torch.device, fill: str, *, contiguous: bool) -> Placed:
    """The upstream gradients in their layouts; an expanded one keeps its single element of storage."""
    given = {name: reference.upstream[name] for name in reference.used}
    tensors = {
        name: TensorCase(str(gradient.dtype).removeprefix("torch."), Layout() if contiguous else reference.layout[name])
        for name, gradient in given.items()
        if contiguous or reference.layout[name].kind != "expanded"
    }
    return place(given, Case(case.sizes, case.dtype, tensors, seed=case.seed), device, fill)


def _accept(trial: Trial, attempt: _Attempt) -> Verdict | None:
    """What ends the check before any gradient is looked at; ``None`` if nothing does."""
    outcome, spec = attempt.outcome, trial.spec
    if isinstance(outcome.error, _NoGraph):
        return failed(
            NAME,
            f"{outcome.error} does not require grad though the reference's does: it is not connected to the inputs "
            "(computed under no_grad, detached, or an autograd.Function that was bypassed)",
            identity="gradients:missing:graph",
            cause="gradient-missing",
        )
    if outcome.error is not None:
        if rejection(spec, outcome.error) is not None:
            return passed(NAME, refused=type(outcome.error).__name__)
        return error_verdict(outcome)
    accessed = memory.check_access(outcome, chance=any(map(trial.tolerates, _gradient_names(attempt))))
    if accessed is not None:
        return accessed
    hurt = memory.check_damage([*outcome.damage, *attempt.upstream.arena.damage()])
    if hurt.failed:
        return hurt
    changes = memory.check_inputs(attempt.placed.arena.changed(), (*spec.mutates, *spec.clobbers))
    if changes.failed:
        return changes
    for change in attempt.upstream.arena.changed():
        return failed(
            NAME,
            f"backward changed {change.count} element(s) of the upstream gradient of {change.name}, the first at "
            f"{list(change.first)}: autograd hands the same tensor to other branches of the graph",
            identity=f"gradients:upstream:{change.name}",
            cause="mutates-input",
        )
    return None


def _gradient_names(attempt: _Attempt) -> list[str]:
    return [] if attempt.backward is None else [f"d{name}" for name in attempt.backward.gradients]


def _compare(
    trial: Trial, reference: _Reference, backward: _Backward, few: Mapping[str, OutputLanes]
) -> Verdict | None:
    """Every gradient against the reference's; ``None`` where all agree."""
    for name in reference.wanted:
        got = backward.gradients[name]
        if name not in few:
            if got is not None and bool((got != 0).any()):
                return failed(
                    NAME,
                    f"{name} has a gradient though no output of the reference depends on it",
                    identity=f"gradients:extra:{name}",
                )
            continue
        native = reference.native[name]
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
        with trial.bench.clock.phase("judge"):
            judged = values.judge_one(
                got.detach(),
                native,
                few[name],
                lambda name=name: reference.lanes(MANY_LANES)[name],  # type: ignore[misc]
                trial.spec.tolerance,
            )
        if not judged.ok:
            kind = "nonfinite" if judged.statistic == "nonfinite" else "finite"
            evidence = values.evidence_of(f"d{name}", judged)
            ratio = _constant_ratio(got, few[name].oracle)
            if ratio is not None:
                evidence["ratio_to_right"] = ratio
            return failed(
                NAME,
                f"gradient of {name}: {judged.reason}",
                identity=f"gradients:{name}:{kind}",
                statistical=judged.statistical,
                upstream=reference.kind,
                layouts={name: reference.layout[name].kind for name in reference.used},
                wanted=list(reference.wanted),
                **evidence,
            )
    return None


def _constant_ratio(got: torch.Tensor, right: torch.Tensor) -> float | None:
    """The constant that the gradient is too large by; ``None`` where it is none."""
    a, b = got.detach().double().flatten(), right.double().flatten()
    large = b.abs() > b.abs().max() / 16
    if not bool(large.any()) or not bool(torch.isfinite(a).all()):
        return None
    ratios = a[large] / b[large]
    middle = float(ratios.median())
    same = bool((ratios - middle).abs().max() <= _SAME_RATIO * abs(middle))
    if len(ratios) == 1:
        # One element is always some multiple of the right one; factors that are forgotten are small whole numbers.
        same = any(abs(r - round(r)) < _SAME_RATIO and 1 <= abs(round(r)) <= 64 for r in (middle, 1 / (middle or 1)))
    return middle if same and abs(middle - 1) > _OTHER_RATIO else None


def _explained(trial: Trial, reference: _Reference, verdict: Verdict, few: Mapping[str, OutputLanes]) -> Verdict:
    """The same failure with what one more experiment says: right with a contiguous upstream gradient?"""
    if verdict.identity.startswith(("gradients:missing", "gradients:extra", "gradients:structure")):
        return verdict
    evidence = dict(verdict.evidence)
    if "ratio_to_right" in evidence:
        evidence["cause"] = "gradient-scale"
    if any(reference.layout[name].kind != "contiguous" for name in reference.used):
        plain = _Attempt(trial, reference, FILLS[0], contiguous=True)
        right = plain.backward is not None and _accept(trial, plain) is None
        if right and _compare(trial, reference, plain.backward, few) is None:  # type: ignore[arg-type]
            evidence["cause"] = "gradient-layout"
            layouts = ", ".join(sorted(set(evidence.get("layouts", {}).values())))
            reason = f"{verdict.reason}; it is right when the upstream gradient is contiguous, here it is {layouts}"
            return failed(NAME, reason, identity=verdict.identity, **evidence)
    return failed(NAME, verdict.reason, identity=verdict.identity, statistical=verdict.statistical, **evidence)


def _second_backward(trial: Trial, reference: _Reference, backward: _Backward) -> Verdict | None:
    """The same gradients from a second backward through a retained graph."""
    if backward.again is None:
        return None
    first = {f"d{n}": g for n, g in backward.gradients.items() if g is not None}
    second = {f"d{n}": g for n, g in backward.again.items() if g is not None}
    difference = repeat.first_difference(first, second)
    if difference is None or trial.tolerates(difference[0]):
        return None
    name, mask = difference
    for _ in range(_CHANCES):
        fresh = _Attempt(trial, reference, FILLS[0])
        if fresh.backward is None:
            return _accept(trial, fresh)
        other = {f"d{n}": g for n, g in fresh.backward.gradients.items() if g is not None}
        if repeat.first_difference(first, other) is not None:
            return _varies(name, mask)
    return failed(
        NAME,
        f"a second backward through the retained graph gives another {name} in {int(mask.sum())} of {mask.numel()} "
        "element(s): the first one overwrote what it had saved",
        identity=f"gradients:again:{name}",
        cause="stale-state",
    )


def _varies(name: str, mask: torch.Tensor) -> Verdict:
    return failed(
        "repeat",
        f"{name} differs in {int(mask.sum())} of {mask.numel()} element(s) from one backward to the next; declare "
        f'deterministic={{"{name}": False}} if its order of additions is meant to vary',
        identity=f"repeat:{name}",
        output=name,
    )


def _other_fill(trial: Trial, reference: _Reference, first: _Attempt) -> Verdict | None:
    """The same gradients with other bytes around the inputs and in fresh memory."""
    assert first.backward is not None
    before = {f"d{n}": g for n, g in first.backward.gradients.items() if g is not None}
    other = _Attempt(trial, reference, FILLS[1])
    if other.backward is None:
        return _accept(trial, other)
    after = {f"d{n}": g for n, g in other.backward.gradients.items() if g is not None}
    difference = repeat.first_difference(before, after)
    if difference is None or trial.tolerates(difference[0]):
        return None
    name, mask = difference
    same = _Attempt(trial, reference, FILLS[0])
    if same.backward is None:
        return _accept(trial, same)
    once_more = {f"d{n}": g for n, g in same.backward.gradients.items() if g is not None}
    if repeat.first_difference(before, once_more) is not None:
        return _varies(name, mask)
    return failed(
        "bounds",
        f"{int(mask.sum())} of {mask.numel()} element(s) of {name} depend on what lies around the inputs or in fresh "
        f"memory{memory.read_at(other.outcome, scratch=True) or memory.read_at(other.outcome, scratch=False)}",
        identity=f"bounds:{name}",
        output=name,
    )
