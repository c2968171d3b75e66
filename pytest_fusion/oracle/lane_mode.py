"""The dispatch mode that runs every operation natively and, in lock-step, on all lanes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from pytest_fusion.case.containers import tensors_of
from pytest_fusion.interpreter.bridge.dispatch import one_by_one
from pytest_fusion.oracle.evaluation import Evaluator, on_copies, results_of
from pytest_fusion.oracle.imaginary import parts, split
from pytest_fusion.oracle.lane_result import Drawn
from pytest_fusion.oracle.lane_store import Lanes, exact_lanes
from pytest_fusion.oracle.marks import mark_made, mark_written, source_of
from pytest_fusion.oracle.operator_plan import Plan, drawn_by, plan_of
from pytest_fusion.oracle.ops.rule_registry import named
from pytest_fusion.oracle.python_numbers import filled, lifted, rounds_to
from pytest_fusion.oracle.rounding import D, Noise, holds
from pytest_fusion.run import pristine


class TooSlow(Exception):
    """A run of the reference in its lanes exceeded its time limit: no evidence against the kernel."""


class LaneMode(Evaluator):
    """Shapes, control flow and random draws follow the native values; rounding is repeated in every lane.

    Lane 0 is the float64 oracle. Lanes 1..K round each result at random: to its native dtype (kind ``E``, the reference
    as written) or to float32 (kind ``F``). Final results are read before that rounding. The first operation after
    ``limit_s`` seconds raises ``TooSlow``: scores of 1025 rows by 1025 are 10^6 elements from inputs of 10^3, in seven
    lanes of float64. The limit applies to the smaller of wall and CPU time, so that a loaded machine or many cores do
    not count.
    """

    def __init__(self, noise: Noise, limit_s: float = math.inf) -> None:
        super().__init__(noise)
        self.taken: list[str] = []
        self._limit_s, self._began, self._worked = limit_s, pristine.perf_counter(), time.process_time()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Each operation reads the wall clock only: 0.1 us instead of 0.4 for CPU time.
        late = pristine.perf_counter() - self._began > self._limit_s
        if late and time.process_time() - self._worked > self._limit_s:
            raise TooSlow(f"one run of the reference in its lanes takes more than {self._limit_s:g} s")
        kwargs = kwargs or {}
        plan = plan_of(func)
        # A composite "view" may be a copy: inside a decomposition `to` and `reshape` arrive undecomposed.
        if plan.composite and not plan.written and (plan.view or plan.operator.rule is None):
            with self:
                return func.decompose(*args, **kwargs)
        if plan.view:
            out = func(*args, **kwargs)
            if plan.name == "lift_fresh" and (lanes := lifted(self.noise, out)) is not None:
                self.store.put(out, lanes)
            return out
        if plan.name.startswith("_foreach_"):
            with self:
                return one_by_one(func, args, kwargs)
        if plan.written:
            return self._mutating(func, plan, args, kwargs)
        if plan.operator.updates:
            return self._updating(func, plan, args, kwargs)
        out = func(*args, **kwargs)
        self._follow(func, plan, args, kwargs, out)
        return out

    def _follow(self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Give the results of a functional operation their lanes."""
        given = tensors_of((args, kwargs))
        results = [o for o in results_of(out) if isinstance(o, Tensor)]
        # Views, whatever the schema says (unsafe_split), have the lanes of their base.
        results = [o for o in results if not any(self.store.shares(o, t) for t in given)]
        if plan.name == "_local_scalar_dense" and args[0].is_floating_point() and self.store.tracks(args[0]):
            self.taken.append("item")
        if plan.empty:
            for result in results:
                self.store.mark(result, unwritten=True)
            return
        if plan.draws and plan.operator.rule is None:
            self.drawn |= drawn_by(args, kwargs)
            return
        if plan.operator.constant:
            if (lanes := filled(self.noise, results[0], args, kwargs)) is not None:
                self.store.put(results[0], lanes)
            return
        mark_made(self.store, plan.operator, args, given, results)
        if not results or not self._matters(plan, args, kwargs, given, results):
            return
        every = self.evaluate(self.called(func, plan, args, kwargs, out))
        for native, lanes in zip(results_of(out), every or (), strict=False):
            if lanes is not None and any(native is result for result in results):
                self.store.put(parts(native), split(lanes))

    def _matters(
        self, plan: Plan, args: Any, kwargs: Any, operands: Sequence[Tensor], results: Sequence[Tensor]
    ) -> bool:
        """Whether the native result may be inexact; False for exact values that are moved or compared."""
        known = plan.operator
        if any(map(self.store.follows, operands)):
            return True
        if known.modulus and any(t.is_complex() for t in operands):
            return True
        if any(r.is_complex() for r in results):
            return not known.exact and bool(operands)
        if known.exact or known.semantic:
            return known.unordered or rounds_to(args, kwargs, operands) is not None
        if not operands or not any(r.dtype.is_floating_point for r in results):
            # fp8 and integer conversions of exact values are exact, but the value before them is needed.
            return False
        if known.casts:
            source, target = operands[0].dtype, results[0].dtype
            return source.is_floating_point and source != target and not holds(target, source)
        return True

    def _mutating(self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an in-place or ``out=`` operation; its lanes are computed first, from the values before it."""
        arguments, names = named(func, args, kwargs), dict(plan.written).values()
        written = tensors_of([arguments.get(name) for name in names])
        inputs = tensors_of({key: value for key, value in arguments.items() if not plan.outs or key not in names})
        replaced = [id(t) for t in written if plan.operator.overwrites and self.store.covers(t)]
        source = source_of(self.store, [t for t in inputs if id(t) not in replaced])
        if plan.outs or plan.operator.overwrites:
            for target in written:
                self.store.unmark(target)
        lanes: list[Lanes | None] = [None] * len(written)
        if plan.draws or plan.name in ("set", "resize", "set_data"):
            self.drawn |= drawn_by(args, kwargs) if plan.draws else Drawn.NONE
        elif any(map(self.store.follows, (*inputs, *written))) or not _moves(plan, args, kwargs, written, inputs):
            lanes = self._to_be_written(func, plan, args, kwargs, written)
            self._capture(written)
        out = func(*args, **kwargs)
        for target, value in zip(written, lanes, strict=False):
            self._store_written(target, value)
        mark_written(self.store, source, written)
        return out

    def _to_be_written(
        self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> list[Lanes | None]:
        """The lanes that an operation will write: by its functional form, else by running it on copies."""
        if plan.functional is not None and (plan.operator.rule is not None or len(written) == 1):
            names = dict(plan.written).values() if plan.outs else ()
            remaining = {key: value for key, value in kwargs.items() if key not in names}
            result = plan.functional(*args, **remaining)
            return self.evaluate(self.called(plan.functional, plan, args, remaining, result)) or [None] * len(written)
        self.fallback(plan.name)
        call = self.called(func, plan, args, kwargs, written)
        made = self.run_shaken(call, on_copies(func, [name for _, name in plan.written])) or [None] * len(written)
        return [
            self.finished(self.unsure(value, call), target) if isinstance(value, Tensor) else None
            for target, value in zip(written, made, strict=False)
        ]

    def _capture(self, written: Sequence[Tensor]) -> None:
        for target in map(parts, written):
            if not self.store.covers(target):
                self.store.capture(target)

    def _updating(self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that writes arguments against its schema; its decomposition gets copies."""
        written = {at: args[at] for at in plan.operator.updates if isinstance(args[at], Tensor)}
        with self:
            copies = {at: target.clone() for at, target in written.items()}
        before = tuple(copies.get(at, value) for at, value in enumerate(args))
        self._capture(list(written.values()))
        out = func(*args, **kwargs)
        self._follow(func, plan, before, kwargs, out)
        for at, target in written.items():
            self._store_written(target, self.store.read(copies[at]))
        return out

    def _store_written(self, target: Tensor, value: Lanes | None) -> None:
        if value is None:
            self._rewrite(target)
            return
        target, value = parts(target), split(value)
        if target.dtype.is_floating_point and value.raw.dtype != D:
            value = Lanes(value.raw, value.raw, value.terms).each(lambda lanes: lanes.to(D))
        value = replace(value.bare, chain=value.chain)
        self.store.unmark(target)
        self.store.write(target, value.each(lambda lanes: lanes.expand(lanes.shape[0], *target.shape)))

    def _rewrite(self, target: Tensor) -> None:
        """Record that ``target`` now has exact native values."""
        target = parts(target)
        self.store.unmark(target)
        if self.store.covers(target):
            self.store.forget(target)
        elif self.store.tracks(target):
            self.store.write(target, exact_lanes(target))


def _moves(plan: Plan, args: Any, kwargs: Any, written: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether an operation writes exact values if it reads exact ones."""
    if plan.operator.exact or plan.operator.semantic:
        return not rounds_to(args, kwargs, inputs)
    if plan.name == "copy" and holds(written[0].dtype, args[1].dtype):
        return True
    return not any(t.dtype.is_floating_point or t.is_complex() for t in written)
