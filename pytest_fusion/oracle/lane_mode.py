"""The dispatch mode that runs every operation natively and, in lock-step, on all lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pytest_fusion.case.containers import tensors_of
from pytest_fusion.interpreter.bridge.dispatch import DispatchMode
from pytest_fusion.oracle.cancellation import (
    NARROW,
    SUMS,
    exposed,
    loose,
    multiplied_out,
    reread,
    scaled_before,
    widened,
)
from pytest_fusion.oracle.chains import chain_of, noted
from pytest_fusion.oracle.drift import product_terms
from pytest_fusion.oracle.finish import finished
from pytest_fusion.oracle.imaginary import disturbed, largest_over, paired, parts, split, transforms
from pytest_fusion.oracle.lane_result import Drawn
from pytest_fusion.oracle.lane_store import Lanes, Store, exact_lanes
from pytest_fusion.oracle.lanewise import REFUSED, check_shapes, on_copies, results_of, run_on_lanes
from pytest_fusion.oracle.lists import one_by_one, takes_lists
from pytest_fusion.oracle.marks import CASTS, mark_made, mark_written, multiplied_coarsely, source_of
from pytest_fusion.oracle.operator_plan import CONSTANTS, Plan, decompositions, drawn_by, plan_of
from pytest_fusion.oracle.ops import Op
from pytest_fusion.oracle.ops.ordering import UNORDERED
from pytest_fusion.oracle.ops.pointwise import over
from pytest_fusion.oracle.ops.rule_registry import named
from pytest_fusion.oracle.python_numbers import filled, lifted, mixed, narrowed, narrowed_lanes, rounds_to
from pytest_fusion.oracle.rounding import GRIDS, D, Noise, holds
from pytest_fusion.spec.wording import out_of_memory

# In-place operations that do not read what they write.
OVERWRITES = frozenset({"copy", "fill", "zero"})
# Operations on complex numbers that change no digit but by their result's dtype.
MOVES = frozenset({"_to_copy", "copy", "clone", "complex", "fill", "zero"})
# Exact of real numbers; of complex ones a root of two squares, and what is divided by it.
MODULI = frozenset({"abs", "sgn"})
PRODUCTS = frozenset({"mm", "bmm"})
# The last two operands of these are the factors of a product.
FACTORS = PRODUCTS | {"addmm", "baddbmm"}
# Positions of the running statistics, which these write.
UPDATES = dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), (3, 4))
_UNSURE = 2.0**-21


class LaneMode(DispatchMode):
    """Shapes, control flow and random draws follow the native values; rounding is repeated in every lane.

    Lane 0 is the float64 oracle. Lanes 1..K round each result at random: to its native dtype (kind ``E``, the
    reference as written) or to float32 (kind ``F``, float32 inside). Final results are read before that rounding.
    """

    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self.noise = noise
        self.store = Store(1 + noise.lanes)
        self.fallbacks: list[str] = []
        self.drawn = Drawn.NONE
        self.taken: list[str] = []
        self._readers = 0

    def lanes_of(self, tensor: Tensor) -> Lanes:
        """Lanes of a native tensor: the tracked ones, or its exact value where nothing has been rounded."""
        if tensor.is_complex():
            return paired(self.lanes_of(parts(tensor)), tensor)
        found = self.store.read(tensor)
        if found is not None:
            return found
        lanes = exact_lanes(tensor)
        if self.store.unwritten(tensor) and tensor.dtype in GRIDS and tensor.numel():
            # Memory from empty() that no ATen operation wrote: a kernel launched outside the dispatcher did.
            self._fallback("memory written outside ATen")
            noisy = self.noise.relative(lanes.raw, 2.0 ** (1 - GRIDS[tensor.dtype].bits))
            return Lanes(noisy, noisy)
        if tensor.dtype in (torch.float32, torch.bfloat16) and tensor.numel():
            size = lanes.raw.abs()
            if bool(((size < GRIDS[tensor.dtype].tiny) & (size > 0)).any()):
                # A kernel compiled with flush-to-zero reads subnormal inputs as zeros.
                return Lanes(lanes.raw, self.noise.rounded(lanes.raw, tensor.dtype))
        return lanes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        plan = plan_of(func)
        # A composite "view" may be a copy: inside a decomposition `to` and `reshape` arrive as they are.
        if plan.composite and not plan.written and (plan.view or plan.rule is None):
            with self:
                return func.decompose(*args, **kwargs)
        if plan.view:
            out = func(*args, **kwargs)
            if plan.name == "lift_fresh" and (lanes := lifted(self.noise, out)) is not None:
                self.store.put(out, lanes)
            return out
        if takes_lists(plan.name):
            with self:
                return one_by_one(func, args, kwargs)
        if plan.written:
            return self._mutating(func, plan, args, kwargs)
        if plan.name in UPDATES:
            return self._updating(func, plan, args, kwargs)
        out = func(*args, **kwargs)
        self._follow(func, plan, args, kwargs, out)
        return out

    def _follow(self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Gives the results of a functional operation their lanes."""
        given = tensors_of((args, kwargs))
        results = [o for o in results_of(out) if isinstance(o, Tensor)]
        # A view, whatever its schema says (unsafe_split): its lanes are those of what it is a view of.
        results = [o for o in results if not any(self.store.shares(o, t) for t in given)]
        if plan.name == "_local_scalar_dense" and args[0].is_floating_point() and self.store.tracks(args[0]):
            self.taken.append("item")
        if plan.empty:
            for result in results:
                self.store.mark_unwritten(result)
            return
        if plan.draws and plan.rule is None:
            self.drawn |= drawn_by(args, kwargs)
            return
        if plan.name in CONSTANTS:
            if (lanes := filled(self.noise, results[0], args, kwargs)) is not None:
                self.store.put(results[0], lanes)
            return
        mark_made(self.store, plan, args, given, results)
        if not results or not self._matters(plan, args, kwargs, given, results):
            return
        every = self._evaluate(func, plan, args, kwargs, out)
        if every is None:
            return
        for native, lanes in zip(results_of(out), every, strict=False):
            if lanes is not None and any(native is result for result in results):
                lanes = split(lanes)
                self.store.put(parts(native), lanes)

    def _matters(
        self, plan: Plan, args: Any, kwargs: Any, operands: Sequence[Tensor], results: Sequence[Tensor]
    ) -> bool:
        """False where the native result is exact: values moved or compared that nothing has rounded."""
        if any(self.store.tracks(t) or self.store.unwritten(t) for t in operands):
            return True
        floating = any(r.dtype.is_floating_point for r in results)
        if plan.name in MODULI and any(t.is_complex() for t in operands):
            return True
        if any(r.is_complex() for r in results):
            return not plan.exact and bool(operands)
        if plan.exact or plan.semantic:
            return plan.name in UNORDERED or rounds_to(args, kwargs, operands) is not None
        if not floating or not operands:
            # fp8 and integer conversions of exact values are exact too, except that the value before it is wanted.
            return False
        if plan.name in CASTS:
            source, target = operands[0].dtype, results[0].dtype
            return source.is_floating_point and source != target and not holds(target, source)
        return True

    def _evaluate(
        self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> list[Lanes | None] | None:
        """Lanes of every result of ``func(*args, **kwargs) -> out``; None leaves the native values exact."""
        operands = tensors_of((args, kwargs))
        seen = {id(t): self.lanes_of(t) for t in operands[plan.name in OVERWRITES :]}
        if plan.name in OVERWRITES:
            # Not read: what is in memory from empty() would decide which random numbers the rest gets.
            seen.setdefault(id(operands[0]), exact_lanes(operands[0]))
        if any(t.is_complex() for t in (*operands, *tensors_of(out))):
            moves = plan.name not in MODULI and (plan.exact or plan.name in MOVES)
            if not moves:
                self._fallback(plan.name + " (complex)")
            return self._by_running(func, args, kwargs, out, seen, noisy=not moves)
        if plan.rule is not None:
            try:
                self.drawn |= Drawn.OWN if plan.name == "native_dropout" and bool(args[1]) else Drawn.NONE
                return self._by_rule(func, plan, args, kwargs, out, seen)
            except REFUSED as error:
                # No other way needs less, and one of less noise would accuse the kernel.
                if out_of_memory(error):
                    raise
                if plan.draws:
                    # Running it again would draw again; its native result is the only one there is.
                    self.drawn |= drawn_by(args, kwargs)
                    return None
                self._fallback(f"{plan.name} ({type(error).__name__})")
        elif "::" not in plan.name:
            found = self._by_decomposition(func, args, kwargs, out)
            if found is not None:
                return found
        if plan.rule is None:
            self._fallback(plan.name)
        return self._by_running(func, args, kwargs, out, seen)

    def _by_rule(
        self, func: Any, plan: Plan, args: Any, kwargs: Any, out: Any, seen: dict[int, Lanes]
    ) -> list[Lanes | None]:
        natives = results_of(out)
        terms = max((lanes.terms for lanes in seen.values()), default=1)
        operands = tensors_of((args, kwargs))
        if not (plan.exact or plan.semantic or plan.name in CASTS):
            seen = self._reread(operands, seen)
        if plan.name in SUMS:
            seen = exposed(operands, seen, self.noise.kind)
        held = {id(seen[key].rounded): seen[key] for key in loose(operands, seen, self.noise.kind)}
        op = Op(self.noise, func, plan.name, tuple(o for o in natives if isinstance(o, Tensor)), args, terms, held)
        read = [seen[id(t)] for t in operands]
        op.spreads = {id(lanes.rounded): lanes.spread[0] for lanes in read if lanes.spread is not None}
        if plan.name in FACTORS:
            op.sizes = {id(lanes.rounded): lanes.chain[0].sqrt() for lanes in read if lanes.chain is not None}
            op.eighths = multiplied_coarsely(self.store, operands[-2:], out.device)
            op.codes = frozenset(id(seen[id(t)].rounded) for t in operands if self.store.of_codes(t))
        if plan.name in PRODUCTS:
            lows = ((seen[id(t)].rounded, t.dtype if t.dtype in NARROW else self.store.widened(t)) for t in operands)
            op.low = {id(value): dtype for value, dtype in lows if dtype is not None}
            sources = ((seen[id(t)].rounded, self.store.source(t)) for t in operands)
            op.sources = {id(value): dtype for value, dtype in sources if dtype is not None}
        rule = plan.rule
        assert rule is not None
        kwargs = {k: v for k, v in kwargs.items() if k not in ("memory_format", "layout", "device", "pin_memory")}

        low = rounds_to(args, kwargs, operands) if plan.exact or plan.semantic else None

        def apply(pick: Callable[[Lanes], Tensor]) -> list[Any]:
            wrapped = tree_map_only(Tensor, lambda t: pick(seen[id(t)]), (args, kwargs))
            found = results_of(rule(op, *wrapped[0], **wrapped[1]))
            if low is None:
                return found
            wrapped = tree_map_only(Tensor, lambda t: narrowed_lanes(t, pick(seen[id(t)]), low), (args, kwargs))
            wrapped = narrowed(wrapped, low)
            return mixed(self.noise, found, results_of(rule(op, *wrapped[0], **wrapped[1])))

        rounded = apply(lambda lanes: lanes.rounded)
        check_shapes(rounded, natives)
        chain = chain_of(self.noise, plan.name, args, kwargs, rounded, seen, op.unit)
        if plan.exact:
            if all(lanes.single for lanes in seen.values()):
                return [None if r is None else Lanes(r, r, terms) for r in rounded]
            raw = apply(lambda lanes: lanes.raw)
            return [
                noted(Lanes(a if isinstance(n, Tensor) and n.dtype.is_floating_point else b, b, terms), chain)
                for a, b, n in zip(raw, rounded, natives, strict=False)
                if isinstance(b, Tensor)
            ]
        if plan.semantic:
            return [Lanes(r, r) if isinstance(r, Tensor) else None for r in rounded]
        if plan.name in ("_to_copy", "copy") and op.operands and _same_dtype(args, natives):
            moved = seen[id(args[-1] if plan.name == "copy" else args[0])]
            device = natives[0].device
            wide = over(moved.raw.to(device), natives[0].shape)
            stored = wide if moved.single else over(moved.rounded.to(device), natives[0].shape)
            return [Lanes(wide, stored, moved.terms)]
        # A sum too, since a compiler lets a product begin with what is added to it, and with what is added to that
        # (Triton makes ``dot(a, b) + c`` one ``dot(a, b, c)``): each step then rounds at the size of the whole.
        made = terms if plan.name in CASTS | SUMS else op.made or product_terms(plan.name, args)
        every = [
            finished(self.noise, value, native, made, op.exact) if isinstance(value, Tensor) else None
            for value, native in zip(rounded, natives, strict=False)
        ]
        if plan.name in CASTS and every[0] is not None:
            every[0] = widened(every[0], op.outs[0].dtype, args[-1] if plan.name == "copy" else args[0], seen)
        if op.spread is not None and plan.name in PRODUCTS and every[0] is not None:
            every[0] = replace(every[0], spread=op.spread.unsqueeze(0))
        if plan.name in SUMS and op.outs[0].dtype == torch.float32 and len(operands) > 1 and every[0] is not None:
            computed = [seen[id(t)] for t in operands]
            if not all(lanes.single for lanes in computed):
                every[0] = multiplied_out(self.noise, every[0], [lanes.rounded for lanes in computed], op.unit)
            elif self.store.is_largest(operands[1], operands[0]):
                every[0] = scaled_before(self.noise, every[0], computed[0].rounded[0], op.unit)
        return [None if lanes is None else noted(lanes, chain) for lanes in every]

    def _reread(self, operands: Sequence[Tensor], seen: dict[int, Lanes]) -> dict[int, Lanes]:
        """What an operation reads: of its narrow operands, every second lane rounded once more (``reread``)."""
        if self.noise.kind != "E":
            return seen
        self._readers += 1
        found = dict(seen)
        for t in operands:
            found[id(t)] = reread(self.noise, seen[id(t)], t.dtype, self._readers)
        return found

    def _by_decomposition(self, func: Any, args: Any, kwargs: Any, out: Any) -> list[Lanes | None] | None:
        """Runs ATen's decomposition of an operation under this mode and takes over the lanes of its results."""
        table = decompositions()
        body = table.get(func)
        if body is None:
            return None
        before = len(self.fallbacks)
        try:
            with self:
                made = body(*args, **kwargs)
        except REFUSED as error:
            if out_of_memory(error):
                raise
            made = NotImplemented
        if made is NotImplemented:
            del self.fallbacks[before:]
            return None
        taken: list[Lanes | None] = []
        for native, ours in zip(results_of(out), results_of(made), strict=False):
            if isinstance(native, Tensor) and isinstance(ours, Tensor) and native.shape == ours.shape:
                taken.append(self.store.read(ours))
            else:
                taken.append(None)
        return taken

    def _by_running(
        self, func: Any, args: Any, kwargs: Any, out: Any, seen: dict[int, Lanes], *, noisy: bool = True
    ) -> list[Lanes | None]:
        """Runs the operation itself on each lane's values; the oracle in float64 where that works.

        The last resort keeps the native value in all lanes, with one unit of the native dtype as its error.
        """
        natives = results_of(out)
        made = run_on_lanes(func, args, kwargs, self._shaken(seen) if noisy else seen, natives)
        if noisy and made is not None and not all(v.dtype == D for v in made if isinstance(v, Tensor)):
            # Indices among the results are those of the operands as they are.
            plain = run_on_lanes(func, args, kwargs, seen, natives) or made
            made = [m if isinstance(m, Tensor) and m.dtype == D else p for m, p in zip(made, plain, strict=True)]
        if made is not None:
            return [
                finished(self.noise, self._unsure(value, func, args) if noisy else value, native)
                if isinstance(value, Tensor) and isinstance(native, Tensor)
                else None
                for value, native in zip(made, natives, strict=False)
            ]
        found: list[Lanes | None] = []
        for native in natives:
            if isinstance(native, Tensor) and native.dtype in GRIDS:
                spread = self.noise.relative(native.detach().to(D).unsqueeze(0), 2.0 ** (1 - GRIDS[native.dtype].bits))
                found.append(Lanes(spread, spread))
            elif isinstance(native, Tensor) and native.is_complex():
                lanes = self._unsure(native.detach().to(torch.complex128).unsqueeze(0), func, args)
                found.append(Lanes(lanes, lanes))
            else:
                found.append(None)
        return found

    def _shaken(self, seen: dict[int, Lanes]) -> dict[int, Lanes]:
        """Operands off by some units: what sums them rounds at their size, however little the sum comes to.

        So errs whoever computes it in a backward stable way (Higham, Accuracy and Stability, section 1.5): pooling and
        interpolation, their gradients, bags, linear solves.
        """
        found = dict(seen)
        for key, lanes in seen.items():
            if lanes.rounded.dtype == D:
                shaken = self.noise.relative(lanes.rounded, _UNSURE / 2)
                found[key] = Lanes(shaken, shaken)
        return found

    def _unsure(self, value: Tensor, func: Any = None, args: Sequence[Any] = ()) -> Tensor:
        # Unknown operations get the noise of an elementary function: 8 units of float32.
        if value.is_complex():
            return disturbed(self.noise, value, largest_over(value, func, args), _UNSURE)
        if value.dtype == D and transforms(func):
            return disturbed(self.noise, value, largest_over(value, func, args), _UNSURE)
        return self.noise.relative(value, _UNSURE) if value.dtype == D else value

    def _mutating(self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An in-place or ``out=`` operation."""
        arguments = named(func, args, kwargs)
        written = tensors_of([arguments.get(name) for _, name in plan.written])
        inputs = tensors_of(
            {k: v for k, v in arguments.items() if not plan.outs or k not in dict(plan.written).values()}
        )
        replaced = [id(t) for t in written if plan.name in OVERWRITES and self.store.covers(t)]
        source = source_of(self.store, [t for t in inputs if id(t) not in replaced])
        out = self._writing(func, plan, args, kwargs, written, inputs)
        mark_written(self.store, source, written)
        return out

    def _writing(
        self,
        func: Any,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[Tensor],
        inputs: list[Tensor],
    ) -> Any:
        """The functional lanes are computed first, from the values before it."""
        if plan.outs or plan.name in OVERWRITES:
            for target in written:
                self.store.mark_written(target)
        tracked = any(self.store.tracks(t) or self.store.unwritten(t) for t in (*inputs, *written))
        if plan.draws or plan.name in ("set", "resize", "set_data"):
            self.drawn |= drawn_by(args, kwargs) if plan.draws else Drawn.NONE
            out = func(*args, **kwargs)
            for target in written:
                self._rewrite(target)
            return out
        moves = plan.exact or plan.semantic or not any(t.dtype.is_floating_point or t.is_complex() for t in written)
        moves = moves or (plan.name == "copy" and holds(written[0].dtype, args[1].dtype))
        moves = moves and not ((plan.exact or plan.semantic) and rounds_to(args, kwargs, inputs))
        if not tracked and moves:
            for target in written:
                self.store.mark_written(target)
            return func(*args, **kwargs)
        if plan.functional is None or (plan.rule is None and len(written) != 1):
            return self._opaque_write(func, plan, args, kwargs, written)
        remaining = {k: v for k, v in kwargs.items() if k not in dict(plan.written).values()} if plan.outs else kwargs
        result = plan.functional(*args, **remaining)
        lanes = self._evaluate(plan.functional, plan, args, remaining, result)
        for target in written:
            if not self.store.covers(parts(target)):
                self.store.capture(parts(target))
        out = func(*args, **kwargs)
        for target, value in zip(written, lanes or [], strict=False):
            self._store_written(target, value)
        return out

    def _updating(self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that writes arguments although its schema does not say so; its decomposition gets copies."""
        written = {at: args[at] for at in UPDATES[plan.name] if isinstance(args[at], Tensor)}
        with self:
            copies = {at: target.clone() for at, target in written.items()}
        before = tuple(copies.get(at, value) for at, value in enumerate(args))
        for target in written.values():
            if not self.store.covers(target):
                self.store.capture(target)
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
        shape = (-1, *target.shape)
        raw, rounded = value.raw, value.rounded
        if target.dtype.is_floating_point and raw.dtype != D:
            raw = rounded = raw.to(D)
        raw_wide = raw.expand(raw.shape[0], *shape[1:])
        rounded_wide = raw_wide if raw is rounded else rounded.expand(rounded.shape[0], *shape[1:])
        self.store.mark_written(target)
        self.store.write(target, Lanes(raw_wide, rounded_wide, value.terms, chain=value.chain))

    def _rewrite(self, target: Tensor) -> None:
        """``target`` now holds exact native values."""
        target = parts(target)
        self.store.mark_written(target)
        if self.store.covers(target):
            self.store.forget(target)
        elif self.store.tracks(target):
            self.store.write(target, exact_lanes(target))

    def _opaque_write(self, func: Any, plan: Plan, args: Any, kwargs: Any, written: Sequence[Tensor]) -> Any:
        """An operation that writes and has no functional form: run on copies of each lane, then natively."""
        self._fallback(plan.name)
        seen = {id(t): self.lanes_of(t) for t in tensors_of((args, kwargs))}
        names = [name for _, name in plan.written]
        for target in written:
            if not self.store.covers(parts(target)):
                self.store.capture(parts(target))
        made = run_on_lanes(on_copies(func, names), args, kwargs, self._shaken(seen), written)
        out = func(*args, **kwargs)
        for target, value in zip(written, made or [None] * len(written), strict=False):
            if isinstance(value, Tensor):
                self._store_written(target, finished(self.noise, self._unsure(value), target))
            else:
                self._rewrite(target)
        return out

    def _fallback(self, name: str) -> None:
        if name not in self.fallbacks:
            self.fallbacks.append(name)


def _same_dtype(args: Sequence[Any], natives: Sequence[Any]) -> bool:
    source = args[-1] if len(args) > 1 and isinstance(args[1], Tensor) else args[0]
    return isinstance(source, Tensor) and source.dtype == natives[0].dtype
