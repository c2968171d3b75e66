"""One forward and backward of the kernel in guarded memory, and what backward changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pytest_fusion import interpreter
from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.checks import memory, structure
from pytest_fusion.checks.context import Outputs, call_placed, collect, error_verdict, rejection, tensors_of
from pytest_fusion.checks.gradients.upstream import NoGraph, Upstream
from pytest_fusion.checks.kernels import refused
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, failed, passed
from pytest_fusion.interpreter.launch import Launch
from pytest_fusion.run import saved_tensors
from pytest_fusion.run.compiled import observe_compiled
from pytest_fusion.run.memory import unwatched
from pytest_fusion.run.memory.damage import Change
from pytest_fusion.run.placing import Placed, place

NAME = "gradients"

Gradients = Mapping[str, torch.Tensor | None]


@dataclass(slots=True)
class Backward:
    """Gradients by input (``None`` where there is none), and what else a backward showed.

    Changed by it: ``upstream`` gradients; ``saved`` tensors, by name; forward's ``outputs``, with the mask of elements.
    ``again`` are a second backward's gradients, if it was made and not refused, ``overwritten`` those of the first, as
    ``dx``, that it changed. ``direct`` names inputs whose ``.grad`` or ``requires_grad`` the kernel set by itself.
    """

    gradients: Gradients
    upstream: list[Change] = field(default_factory=list)
    again: Gradients | None = None
    saved: list[str] = field(default_factory=list)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    overwritten: dict[str, torch.Tensor] = field(default_factory=dict)
    direct: list[str] = field(default_factory=list)


class Attempt:
    """One forward and backward of the kernel; ``backward`` is ``None`` where it did not run."""

    def __init__(
        self, trial: Trial, upstream: Upstream, fill: str, *, twice: bool = False, contiguous: bool = False
    ) -> None:
        context = trial.context
        with context.clock.phase("make"):
            self.placed, self.upstream = prepared(trial, upstream, fill, contiguous=contiguous)
            # The second backward has its own: what the first does to its upstream gradient is another finding.
            self._second = given(trial, upstream, fill, contiguous=contiguous) if twice else self.upstream
        self._trial, self._wanted, self._twice = trial, upstream.wanted, twice
        self._leaves: dict[str, torch.Tensor] = {}
        # What backward launched; ``None`` where it did not come to that.
        self._launched: list[Launch] | None = None
        self.backward: Backward | None = None
        # Whether forward changed each input, as 0-dim bools; read only if one is changed at the end.
        self._altered: Mapping[str, torch.Tensor] = {}
        # Copies of forward's results.
        self.forward: dict[str, torch.Tensor] = {}
        self.outcome = call_placed(context, self._call, self.placed)

    def named(self) -> dict[str, torch.Tensor]:
        """The returned gradients, by the names that ``deterministic=`` uses."""
        return {} if self.backward is None else named(self.backward.gradients)

    def ended(self) -> Verdict | None:
        """What ends the check before any gradient is looked at; ``None`` if nothing does."""
        trial, outcome, error, launched = self._trial, self.outcome, self.outcome.error, self._launched
        context, spec = trial.context, trial.spec
        if launched is not None and refused.note(context, trial.result.case, outcome, launched, backward=True):
            return passed(NAME, refused=type(error).__name__)
        if isinstance(error, NoGraph):
            return failed(
                NAME,
                f"{error} does not require grad though the reference's does: it is not connected to the inputs "
                "(computed under no_grad, detached, or an autograd.Function that was bypassed)",
                identity="gradients:missing:graph",
                cause="gradient-missing",
            )
        if error is not None:
            if rejection(spec, error) is not None:
                return passed(NAME, refused=type(error).__name__)
            trial.result.trace = outcome.trace
            return error_verdict(outcome)
        if (accessed := memory.check_access(outcome, spec)) is not None:
            return accessed
        hurt = memory.check_damage([*outcome.damage, *self.upstream.arena.damage()])
        if hurt.failed and context.on(hurt.check):
            return hurt
        changes = memory.check_inputs(
            self.placed.arena.changed(),
            spec.given_up,
            lambda name: memory.RECORDING if bool(self._altered.get(name)) else memory.BACKWARD,
        )
        return changes if changes.failed and context.on(changes.check) else None

    def results(self) -> dict[str, torch.Tensor] | None:
        """As ``named``; ``None`` where the call raised or left its memory."""
        spoilt = self.backward is None or memory.check_access(self.outcome, self._trial.spec)
        return None if spoilt else self.named()

    def _call(self, **arguments: Any) -> Any:
        spec = self._trial.spec
        self._leaves = {name: arguments[name] for name in self._wanted}
        for name in (each for each in self._wanted if each in spec.clobbers):
            self._leaves[name] = torch.zeros_like(self._trial.logical[name]).requires_grad_(True)
            arguments[name] = _Handed.apply(self._leaves[name], [arguments[name]])  # type: ignore[no-untyped-call]
        result = spec.fused(**arguments)
        outputs = collect(result, arguments, spec.mutates).tensors
        # Copies for comparison are not the kernel's memory: their guards took a tenth of a test's time on an H200.
        with unwatched():
            self.forward = {name: t.detach().clone() for name, t in outputs.items()}
        ends = connected(outputs, self.upstream)
        saved = {name: t.detach() for name, t in saved_tensors.saved(ends).items()}
        with unwatched():
            before = {name: t.clone() for name, t in saved.items()}
            self._altered = self.placed.arena.altered()
        gradients = self._backward(ends, self.upstream, keep=self._twice)
        found = self.backward = Backward(gradients)
        with unwatched():
            found.upstream = self.upstream.arena.changed()
            found.saved = [name for name, t in saved.items() if not _released(t) and repeat.differ(t, before[name])]
            found.outputs = self._changed(outputs, arguments)
        found.direct = self._set_directly(arguments)
        if self._twice:
            with unwatched():
                copies = {name: t.clone() if t is not None else None for name, t in gradients.items()}
            try:
                second = self._second if found.upstream else self.upstream
                found.again = self._backward(ends, second, keep=False)
            except Exception:  # noqa: BLE001
                return result  # refusing a second backward is allowed
            with unwatched():
                found.overwritten = repeat.changed(named(gradients), named(copies))
            found.gradients = copies
        return result

    def _backward(self, ends: list[torch.Tensor], upstream: Placed, *, keep: bool) -> Gradients:
        leaves = [self._leaves[name] for name in self._wanted]
        above = list(upstream.tensors.values())
        seen = self._launched = []
        with interpreter.observe(seen.append), observe_compiled(seen.append):
            found = torch.autograd.grad(ends, leaves, above, allow_unused=True, retain_graph=keep)
        return dict(zip(self._wanted, found, strict=True))

    def _changed(self, outputs: Mapping[str, torch.Tensor], arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Results that backward changed, except in the memory of inputs that it may overwrite."""
        given_up = tensors_of({name: arguments[name] for name in self._trial.spec.given_up}).values()
        returned = {
            name: t.detach()
            for name, t in outputs.items()
            if not _released(t) and not any(structure.overlap(t, other) for other in given_up)
        }
        return repeat.changed(returned, self.forward)

    def _set_directly(self, arguments: Mapping[str, Any]) -> list[str]:
        return [
            name
            for name, t in arguments.items()
            if isinstance(t, torch.Tensor)
            and t.is_leaf
            and name not in self._trial.spec.mutates
            and (t.grad is not None or t.requires_grad != (name in self._wanted))
        ]


def _released(t: torch.Tensor) -> bool:
    """Whether its memory was released by force (``storage.resize_(0)``), so that nothing can be read."""
    return t.numel() > 0 and t.untyped_storage().nbytes() == 0


class _Handed(torch.autograd.Function):
    """Makes the tensor in a list a result of ``leaf``: autograd forbids overwriting a leaf or a view of one."""

    @staticmethod
    def forward(_: Any, leaf: torch.Tensor, holder: list[torch.Tensor]) -> torch.Tensor:  # noqa: ARG004
        return holder[0]

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], None


def named(gradients: Gradients) -> dict[str, torch.Tensor]:
    """Gradients by name: ``dx`` for the gradient of ``x``."""
    return {f"d{name}": t for name, t in gradients.items() if t is not None}


def prepared(trial: Trial, upstream: Upstream, fill: str, *, contiguous: bool = False) -> tuple[Placed, Placed]:
    """The inputs, those wanted requiring grad, and the upstream gradients, in their layouts and guarded memory."""
    placed = place(trial.logical, trial.result.case, trial.context.device, fill)
    for name in upstream.wanted:
        placed.arguments[name].requires_grad_(name not in trial.spec.clobbers)
    placed.arena.snapshot()
    return placed, given(trial, upstream, fill, contiguous=contiguous)


def given(trial: Trial, upstream: Upstream, fill: str, *, contiguous: bool = False) -> Placed:
    """The upstream gradients, in their layouts and guarded memory."""
    case = trial.result.case
    above = {name: upstream.upstream[name] for name in upstream.used}
    # Expanded ones get no layout, so they keep a single element of storage.
    tensors = {
        name: TensorCase(str(gradient.dtype).removeprefix("torch."), Layout() if contiguous else upstream.layout[name])
        for name, gradient in above.items()
        if contiguous or upstream.layout[name].kind != "expanded"
    }
    placed = place(above, Case(case.sizes, case.dtype, tensors, seed=case.seed), trial.context.device, fill)
    placed.arena.snapshot()
    return placed


def connected(outputs: Mapping[str, torch.Tensor], upstream: Placed) -> list[torch.Tensor]:
    """The outputs that get an upstream gradient. Raises ``NoGraph`` for one that does not require grad."""
    for name in upstream.tensors:
        if name not in outputs or not outputs[name].requires_grad:
            raise NoGraph(name)
    return [outputs[name] for name in upstream.tensors]


def wrong_results(trial: Trial, results: Mapping[str, torch.Tensor], when: str, slug: str) -> Verdict | None:
    """The failure of forward's results in other circumstances than the case's own; ``None`` if they are right."""
    lacking = [name for name in trial.order if name not in results]
    if lacking:
        return failed(NAME, f"{when}, the kernel returns no {lacking[0]}", identity=f"gradients:{slug}:nesting")
    got = Outputs({name: results[name] for name in trial.order}, trial.expected.plain, trial.expected.shape)
    verdict = trial.compare(got, keep=True)
    if not verdict.failed:
        return None
    reason = f"{when}, the kernel's results are wrong: {verdict.reason}"
    return replace(verdict, check=NAME, reason=reason, identity=f"gradients:{slug}:{verdict.identity}")
