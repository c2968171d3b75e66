"""The reference's backward pass, and the upstream gradients for it and the kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pytest_fusion.case import counter_random
from pytest_fusion.case.case_model import Layout
from pytest_fusion.case.layouts import choices, geometry
from pytest_fusion.checks import values_check
from pytest_fusion.checks.context import collect
from pytest_fusion.checks.trial import Trial
from pytest_fusion.oracle import Kind, OutputLanes
from pytest_fusion.oracle.reference import ReferenceFailed, copies, on_its_own, takes
from pytest_fusion.oracle.shadow import run_lanes
from pytest_fusion.spec.promises import Tolerance

# Never all ones, which hide a gradient missing as a factor; `expanded` is as from sum().backward(), `zero-rows` as from
# a loss that ignores some rows.
KINDS = ("random", "random", "random", "expanded", "expanded", "negative", "zero", "zero-rows")
_LAYOUTS = ("contiguous", "transposed", "step", "padded", "unflattenable")
_SHARE_OF_ROWS = 0.6
# What most callers send; a backward's fast path requires it, with plain inputs.
_PLAIN_OF, _PLAIN_IN = 2, 5
_WORDS = {"expanded": "of strides 0, one repeated number", "zero": "zeros", "zero-rows": "random, some rows 0"}
# Slices have offsets: with the gradient of a concatenation, in the middle of the whole.
_OFFSETS = (0, 0, 0, 1, 3)
# With several outputs, in one case of three only one has an upstream gradient.
_ONE_ALONE_EVERY = 3


class NoGraph(Exception):
    """An output that must be differentiable is connected to no input; the message is its name."""


def differentiable(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The floating outputs that autograd can differentiate."""
    return {name: t for name, t in outputs.items() if t.dtype.is_floating_point and t.requires_grad}


@dataclass(slots=True)
class Upstream:
    """Upstream gradients of one case by output, and the reference's own gradients for them.

    ``wanted``: inputs that require grad. Set by ``settle`` and ``lanes``: ``used``, outputs that get a gradient. Set by
    ``lanes``: ``present``, inputs that have one, and their ``native`` values.
    """

    trial: Trial
    wanted: list[str]
    kind: str
    upstream: dict[str, torch.Tensor] = field(default_factory=dict)
    layout: dict[str, Layout] = field(default_factory=dict)
    used: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    native: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: frozenset[float] = frozenset()
    # All differentiable outputs, and the single one that gets a gradient, if chosen.
    able: list[str] = field(default_factory=list)
    only: str = ""

    @classmethod
    def of(cls, trial: Trial, wanted: Sequence[str]) -> Upstream:
        """The upstream gradients of the case's seed."""
        kind = KINDS[counter_random.mix(trial.result.case.seed, "upstream kind") % len(KINDS)]
        made = cls(trial, list(wanted), kind)
        floating = {n: t for n, t in trial.expected.tensors.items() if t.dtype.is_floating_point}
        # Made outside of the lanes, which would take the rounding of random numbers for the reference's.
        made.upstream = {name: made.drawn(name, t) for name, t in floating.items()}
        made.layout = {name: made._layout(name, t) for name, t in floating.items()}
        return made

    def settle(self) -> None:
        """Find the outputs that get an upstream gradient, without gradients in memory. Raises as ``lanes``."""
        with self.trial.context.clock.phase("reference"), torch.enable_grad():
            self._graph()

    def lanes(self, count: int, kind: Kind = "E") -> dict[str, OutputLanes]:
        """Lanes of every gradient that the reference has; with a fixed tolerance only native values count.

        Raises ``NoGraph`` where no output depends on the inputs, ``ReferenceFailed`` where the reference raises.
        """
        trial = self.trial
        fixed = isinstance(trial.spec.tolerance, Tolerance)
        seed = counter_random.mix(trial.result.case.seed, "gradient lanes", count)
        with trial.context.clock.phase("reference"), on_its_own(trial.spec.name, trial.logical):
            count = 1 if fixed else count
            limit_s, seen = trial.context.reference_s, self.numbers
            run = run_lanes(self._backward, lanes=count, kind=kind, seed=seed, limit_s=limit_s, numbers=seen)
        self.numbers = run.numbers
        self.native = {name: lanes.native for name, lanes in zip(self.present, run.outputs, strict=True)}
        return dict(zip(self.present, run.outputs, strict=True))

    def eager(self, name: str) -> torch.Tensor | None:
        """The gradient of an input from the reference and its backward in eager 16 bits (samples, *shape)."""
        with self.trial.context.clock.phase("reference"):
            seed = counter_random.mix(self.trial.result.case.seed, "eager")
            return values_check.eager_of(self._backward, lambda: self.present, seed).get(name)

    def size(self, name: str) -> float:
        """How large an element of an input's gradient is where nothing cancels: an input changed by one changes the
        loss by as much as the outputs' parts of it come to, as in ``exp(gate)`` or a score of attention."""
        results = self.trial.expected.tensors
        parts = [(self.upstream[used].double() * results[used].detach().double()).norm() for used in self.used]
        elements = self.trial.logical[name].numel()
        found = float(torch.stack(parts).norm()) / math.sqrt(elements) if parts and elements else 0.0
        return found if math.isfinite(found) else 0.0

    def drawn(self, name: str, output: torch.Tensor) -> torch.Tensor:
        """The upstream gradient of an output of this shape."""
        device, dtype = output.device, output.dtype
        generator = torch.Generator(device)
        generator.manual_seed(counter_random.mix(self.trial.result.case.seed, "upstream", name) >> 1)
        if self.kind == "zero":
            return torch.zeros(output.shape, dtype=dtype, device=device)
        if self.kind == "expanded":
            return torch.randn((), generator=generator, device=device).to(dtype).expand(output.shape)
        drawn = torch.randn(output.shape, generator=generator, device=device)
        if self.kind == "zero-rows" and drawn.dim():
            drawn = drawn * (torch.rand((*drawn.shape[:-1], 1), generator=generator, device=device) < _SHARE_OF_ROWS)
        return (-drawn.abs() if self.kind == "negative" else drawn).to(dtype)

    def strides(self, name: str) -> dict[str, Any] | None:
        """The strides, offset and storage of an output's upstream gradient; ``None`` for one element of storage."""
        if self.layout[name].kind == "expanded":
            return None
        plan = geometry(tuple(self.upstream[name].shape), self.layout[name])
        return {"strides": list(plan.strides), "offset": plan.offset, "storage": plan.storage}

    def words(self) -> str:
        """Kind, outputs and layouts, as in "random, of out (transposed)"."""
        kind = _WORDS.get(self.kind, self.kind)
        if self.kind == "expanded":
            kind += "".join(f" {t.reshape(-1)[0]:.4g}" for n in self.used[:1] if (t := self.upstream[n]).numel())
        places = {n: (self.layout[n].kind, self.layout[n].offset) for n in self.used}
        laid = [f"{n} ({kind}{f', offset {offset}' if offset else ''})" for n, (kind, offset) in places.items()]
        alone = " alone" if len(self.used) == 1 < len(self.able) else ""
        return f"{kind}, of {', '.join(laid)}{alone}"

    def alone(self, output: str) -> Upstream:
        """The upstream gradients of one output alone."""
        return replace(self, only=output, used=[output])

    def constant(self, value: float) -> Upstream:
        """Contiguous upstream gradients that are ``value`` everywhere; its lanes are its own."""
        same = {name: torch.full_like(t, value).contiguous() for name, t in self.upstream.items()}
        return replace(self, kind="constant", upstream=same, layout=dict.fromkeys(self.layout, Layout()))

    def transposed(self) -> Upstream:
        """The same gradients with the last two axes swapped in memory, where outputs have them."""
        allowed = {name: choices(("contiguous", "transposed"), t.dim()) for name, t in self.upstream.items()}
        layout = {name: Layout(kind, 0, variant) for name, [*_, (kind, variant)] in allowed.items()}
        return replace(self, upstream={name: t.contiguous() for name, t in self.upstream.items()}, layout=layout)

    def second(self, of: Mapping[str, torch.Tensor]) -> dict[str, OutputLanes]:
        """The gradients of the sum of ``gradient * of[input]``, rows of the Hessian. Raises ``ReferenceFailed``."""

        def backward() -> list[torch.Tensor]:
            arguments, found = self._first(twice=True)
            ends = {n: g for n, g in found.items() if g is not None and n in of and g.requires_grad}
            leaves = [arguments[name] for name in self.wanted]
            again: Sequence[torch.Tensor | None] = [None] * len(leaves)
            if ends:
                again = _differentiate(list(ends.values()), leaves, [of[name] for name in ends])
            zeros = [torch.zeros_like(self.trial.logical[name]) for name in self.wanted]
            return [t if t is not None else zero for t, zero in zip(again, zeros, strict=True)]

        with self.trial.context.clock.phase("reference"), on_its_own(self.trial.spec.name, self.trial.logical):
            run = run_lanes(backward, lanes=1, kind="E", seed=0)
        return dict(zip(self.wanted, run.outputs, strict=True))

    def _backward(self) -> list[torch.Tensor]:
        _, found = self._first(twice=False)
        self.present = [name for name, gradient in found.items() if gradient is not None]
        return [gradient for gradient in found.values() if gradient is not None]

    def _first(self, *, twice: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor | None]]:
        arguments, outputs = self._graph()
        leaves = [arguments[name] for name in self.wanted]
        ends, given = [outputs[name] for name in self.used], [self.upstream[name] for name in self.used]
        found = _differentiate(ends, leaves, given, create_graph=twice)
        return arguments, dict(zip(self.wanted, found, strict=True))

    def _graph(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The reference's arguments and differentiable outputs; notes the outputs that get a gradient."""
        spec, context = self.trial.spec, self.trial.context
        arguments = copies(self.trial.logical, self.wanted)
        try:
            result = spec.reference(**arguments, **takes(spec.reference, context.extra))
            outputs = differentiable(collect(result, arguments, spec.mutates).tensors)
        except Exception as error:
            raise ReferenceFailed(f"{type(error).__name__}: {error}") from error
        if not outputs:
            raise NoGraph
        self.able = list(outputs)
        self.used = [self.only] if self.only else self._part(self.able)
        return arguments, outputs

    def _part(self, outputs: list[str]) -> list[str]:
        """The outputs that get an upstream gradient: all, or a single one as if only a loss is used."""
        seed = self.trial.result.case.seed
        if len(outputs) == 1 or counter_random.mix(seed, "one alone?") % _ONE_ALONE_EVERY:
            return outputs
        return [outputs[counter_random.mix(seed, "one alone") % len(outputs)]]

    def _layout(self, name: str, output: torch.Tensor) -> Layout:
        if self.kind == "expanded" and output.dim():
            return Layout("expanded")
        seed = self.trial.result.case.seed
        if counter_random.mix(seed, "upstream plain?") % _PLAIN_IN < _PLAIN_OF:
            return Layout()
        allowed = choices(_LAYOUTS, output.dim())
        kind, variant = allowed[counter_random.mix(seed, "upstream layout", name) % len(allowed)]
        return Layout(kind, _OFFSETS[counter_random.mix(seed, "upstream offset", name) % len(_OFFSETS)], variant)


def _differentiate(
    ends: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    *,
    create_graph: bool = False,
) -> Sequence[torch.Tensor | None]:
    try:
        return torch.autograd.grad(ends, leaves, given, create_graph=create_graph, allow_unused=True)
    except Exception as error:
        raise ReferenceFailed(f"{type(error).__name__}: {error}") from error
