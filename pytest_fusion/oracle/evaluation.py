"""Runs an operation on lanes: by its rule, by ATen's decomposition, or by running it on each lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from pytest_fusion.case.containers import tensors_of
from pytest_fusion.interpreter.bridge.dispatch import DispatchMode
from pytest_fusion.oracle.cancellation import exposed, multiplied_out, reread, scaled_before, widened
from pytest_fusion.oracle.chains import chain_of, noted
from pytest_fusion.oracle.drift import steps
from pytest_fusion.oracle.imaginary import disturbed, largest_over, paired, parts, transforms
from pytest_fusion.oracle.lane_result import Drawn
from pytest_fusion.oracle.lane_store import Lanes, Store, exact_lanes
from pytest_fusion.oracle.marks import operand_of
from pytest_fusion.oracle.operand import Operand
from pytest_fusion.oracle.operator_plan import Call, Plan, decompositions, drawn_by
from pytest_fusion.oracle.ops import Op, each
from pytest_fusion.oracle.ops.pointwise import over
from pytest_fusion.oracle.ops.rule_registry import named
from pytest_fusion.oracle.python_numbers import mixed, narrowed, narrowed_lanes, rounds_to
from pytest_fusion.oracle.rounding import GRIDS, D, Noise
from pytest_fusion.spec.wording import out_of_memory

# Unknown operations get the noise of an elementary function: 8 units of float32.
_UNSURE = 2.0**-21
# Lanes do not depend on memory layout.
_LAYOUT = frozenset({"memory_format", "layout", "device", "pin_memory"})


def _rounded(operand: Operand) -> Tensor:
    return operand.lanes.rounded


class Evaluator(DispatchMode):
    """Carries out operations on the lanes of their operands; `LaneMode` decides when."""

    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self.noise = noise
        self.store = Store(1 + noise.lanes)
        self.fallbacks: list[str] = []
        self.drawn = Drawn.NONE
        self._readers = 0

    def lanes_of(self, tensor: Tensor) -> Lanes:
        """Lanes of a native tensor: the tracked ones, or its exact value where nothing is rounded."""
        if tensor.is_complex():
            return paired(self.lanes_of(parts(tensor)), tensor)
        found = self.store.read(tensor)
        if found is not None:
            return found
        lanes = exact_lanes(tensor)
        if self.store.marks(tensor).unwritten and tensor.dtype in GRIDS and tensor.numel():
            # Memory from empty() that no ATen operation wrote: a kernel outside the dispatcher did.
            self.fallback("memory written outside ATen")
            return self._guessed(lanes.raw, tensor)
        if tensor.dtype in (torch.float32, torch.bfloat16) and tensor.numel():
            size = lanes.raw.abs()
            if bool(((size < GRIDS[tensor.dtype].tiny) & (size > 0)).any()):
                # A kernel compiled with flush-to-zero reads subnormal inputs as zeros.
                return Lanes(lanes.raw, self.noise.rounded(lanes.raw, tensor.dtype))
        return lanes

    def fallback(self, name: str) -> None:
        """List an operation that has no rule."""
        if name not in self.fallbacks:
            self.fallbacks.append(name)

    def called(self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Call:
        """The call ``func(*args, **kwargs) -> out`` with the lanes that it reads."""
        given, made = tensors_of((args, kwargs)), dict[int, Lanes]()
        first = plan.operator.overwrites
        for tensor in given[first:]:
            made[id(tensor)] = self.lanes_of(tensor)
        if first:
            # Not read: what empty() memory holds would change the random numbers of the rest.
            made.setdefault(id(given[0]), exact_lanes(given[0]))
        found = {id(t): operand_of(self.store, plan.operator, t, made[id(t)], self.noise.kind) for t in given}
        operands = [found[id(tensor)] for tensor in given]
        tree = tree_map_only(Tensor, lambda t: found[id(t)], (args, kwargs))
        return Call(func, plan, args, kwargs, results_of(out), operands, tree)

    def evaluate(self, call: Call) -> list[Lanes | None] | None:
        """Lanes of every result; None where the native values are exact."""
        plan, known = call.plan, call.plan.operator
        if any(t.is_complex() for t in tensors_of((call.args, call.kwargs, call.natives))):
            moves = not known.modulus and (known.exact or known.moves)
            if not moves:
                self.fallback(plan.name + " (complex)")
            return self._by_running(call, noisy=not moves)
        if known.rule is not None:
            try:
                self.drawn |= Drawn.OWN if plan.name == "native_dropout" and bool(call.args[1]) else Drawn.NONE
                return self._by_rule(call)
            except REFUSED as error:
                # Any other way needs as much memory or has less noise, which would fail honest kernels.
                if out_of_memory(error):
                    raise
                if plan.draws:
                    # Running it again would draw again; the native result stands.
                    self.drawn |= drawn_by(call.args, call.kwargs)
                    return None
                self.fallback(f"{plan.name} ({type(error).__name__})")
        elif "::" not in plan.name:
            found = self._by_decomposition(call)
            if found is not None:
                return found
        if known.rule is None:
            self.fallback(plan.name)
        return self._by_running(call)

    def _by_rule(self, call: Call) -> list[Lanes | None]:
        known = call.plan.operator
        terms = max((operand.lanes.terms for operand in call.operands), default=1)
        self._read(call)
        outs = tuple(native for native in call.natives if isinstance(native, Tensor))
        op = Op(self.noise, call.func, call.plan.name, outs, call.args, terms)
        whole = not any(t.is_floating_point() for t in tensors_of((call.args, call.kwargs, call.natives)))
        if whole and not (known.exact or known.semantic or known.casts or known.places):
            # Nothing rounds: noise just below an integer would make it another one.
            args, kwargs = call.on(_rounded)
            return [Lanes(value, value) for value in results_of(each(call.func, *args, **kwargs))]
        rounded = self._applied(op, call, lambda operand: operand if known.operands else operand.value)
        check_shapes(rounded, call.natives)
        chain = chain_of(op, call, rounded)
        if known.semantic or (known.exact and all(operand.single for operand in call.operands)):
            made = terms if known.exact else 1
            return [Lanes(value, value, made) if isinstance(value, Tensor) else None for value in rounded]
        every = self._moved(op, call, rounded) if known.exact else self._computed(op, call, rounded)
        return [None if lanes is None else noted(lanes, chain) for lanes in every]

    def _read(self, call: Call) -> None:
        """Replace operands by what an operation may read instead of what the reference stored."""
        known = call.plan.operator
        if self.noise.kind == "E" and not (known.exact or known.semantic or known.casts):
            self._readers += 1
            reread(self.noise, call.operands, self._readers)
        if known.sums:
            exposed(call.operands)

    def _applied(self, op: Op, call: Call, pick: Callable[[Operand], Any]) -> list[Any]:
        """The rule's results on what ``pick`` takes of operands, in some lanes with numbers as 16 bits hold them."""
        known = call.plan.operator
        assert known.rule is not None
        args, kwargs = call.on(pick)
        kwargs = {key: value for key, value in kwargs.items() if key not in _LAYOUT}
        found = results_of(known.rule(op, *args, **kwargs))
        natives = [operand.native for operand in call.operands]
        low = rounds_to(call.args, call.kwargs, natives) if known.exact or known.semantic else None
        if low is None:
            return found
        args, _ = narrowed(call.on(lambda operand: narrowed_lanes(operand.native, pick(operand), low)), low)
        return mixed(self.noise, found, results_of(known.rule(op, *args, **narrowed(kwargs, low))))

    def _moved(self, op: Op, call: Call, rounded: list[Any]) -> list[Lanes | None]:
        """Lanes of moved or selected values, with their values before the last rounding."""
        raw = self._applied(op, call, lambda operand: operand.lanes.raw)
        return [
            Lanes(before if isinstance(native, Tensor) and native.is_floating_point() else after, after, op.terms)
            for before, after, native in zip(raw, rounded, call.natives, strict=False)
            if isinstance(after, Tensor)
        ]

    def _computed(self, op: Op, call: Call, values: list[Any]) -> list[Lanes | None]:
        """Lanes of values that are rounded now, with what their readers may have instead."""
        known, operands, native = call.plan.operator, call.operands, op.outs[0]
        if known.casts and operands[-1].native.dtype == native.dtype:
            return [operands[-1].lanes.bare.each(lambda value: over(value.to(native.device), native.shape))]
        # Sums too: a compiler may start a product with the addend, so that each step rounds at the size of the whole.
        # Triton makes ``dot(a, b) + c`` one ``dot(a, b, c)``.
        made = op.terms if known.casts or known.sums else op.made
        if known.factors and not made:
            made = steps(operands[-2].native, operands[-1].native)
        every = [
            self.finished(value, native, made or 1, op.exact) if isinstance(value, Tensor) else None
            for value, native in zip(values, call.natives, strict=False)
        ]
        if every[0] is not None:
            every[0] = self._handed_on(op, call, every[0])
        return every

    def _handed_on(self, op: Op, call: Call, found: Lanes) -> Lanes:
        """The lanes of a result with what its readers may have instead."""
        known, operands = call.plan.operator, call.operands
        if known.casts:
            return widened(found, op.outs[0].dtype, operands[-1])
        if known.product and op.spread is not None:
            return replace(found, spread=op.spread.unsqueeze(0))
        if known.sums and op.outs[0].dtype == torch.float32 and len(operands) > 1:
            if not all(operand.single for operand in operands):
                return multiplied_out(self.noise, found, operands, op.unit)
            if self.store.is_largest(operands[1].native, operands[0].native):
                return scaled_before(self.noise, found, operands[0].value[0], op.unit)
        return found

    def _by_decomposition(self, call: Call) -> list[Lanes | None] | None:
        """Lanes from ATen's decomposition of an operation, run under this mode."""
        body = decompositions().get(call.func)
        if body is None:
            return None
        before = len(self.fallbacks)
        try:
            with self:
                made = body(*call.args, **call.kwargs)
        except REFUSED as error:
            if out_of_memory(error):
                raise
            made = NotImplemented
        found = [
            self.store.read(ours)
            if isinstance(native, Tensor) and isinstance(ours, Tensor) and native.shape == ours.shape
            else None
            for native, ours in zip(call.natives, results_of(made), strict=False)
        ]
        if made is NotImplemented or any(map(_adds_nan, found, call.natives)):
            del self.fallbacks[before:]
            return None
        return found

    def _by_running(self, call: Call, *, noisy: bool = True) -> list[Lanes | None]:
        """Lanes from running the operation on each lane, or else of the native value with an error of one unit."""
        made = self.run_shaken(call, call.func) if noisy else run_on_lanes(call, call.func, _rounded)
        if made is None:
            return [self._unknown(call, native) for native in call.natives]
        if noisy and not all(value.dtype == D for value in made if isinstance(value, Tensor)):
            # Indices among the results come from the unperturbed operands.
            plain = run_on_lanes(call, call.func, _rounded) or made
            made = [m if isinstance(m, Tensor) and m.dtype == D else p for m, p in zip(made, plain, strict=True)]
        return [
            self.finished(self.unsure(value, call) if noisy else value, native)
            if isinstance(value, Tensor) and isinstance(native, Tensor)
            else None
            for value, native in zip(made, call.natives, strict=False)
        ]

    def _guessed(self, value: Tensor, native: Tensor) -> Lanes:
        """A native result in all lanes, with one unit of its dtype as its error."""
        lanes = self.noise.relative(value, 2.0 ** (1 - GRIDS[native.dtype].bits))
        return Lanes(lanes, lanes)

    def _unknown(self, call: Call, native: Any) -> Lanes | None:
        if isinstance(native, Tensor) and native.dtype in GRIDS:
            return self._guessed(native.detach().to(D).unsqueeze(0), native)
        if isinstance(native, Tensor) and native.is_complex():
            lanes = self.unsure(native.detach().to(torch.complex128).unsqueeze(0), call)
            return Lanes(lanes, lanes)
        return None

    def run_shaken(self, call: Call, function: Callable[..., Any]) -> list[Any] | None:
        """`run_on_lanes` of perturbed operands: a sum of them rounds at their size, however small it is."""
        # This is the error of any backward stable method (Higham, Accuracy and Stability, section 1.5): pooling and
        # interpolation, their gradients, bags, linear solves.
        shaken = {
            operand: self.noise.relative(operand.lanes.rounded, _UNSURE / 2)
            for operand in dict.fromkeys(call.operands)
            if operand.lanes.rounded.dtype == D
        }
        return run_on_lanes(call, function, lambda operand: shaken.get(operand, _rounded(operand)))

    def unsure(self, value: Tensor, call: Call) -> Tensor:
        """The result of an operation without a rule, with noise."""
        if value.is_complex() or (value.dtype == D and transforms(call.func)):
            return disturbed(self.noise, value, largest_over(value, call.func, call.args), _UNSURE)
        return self.noise.relative(value, _UNSURE) if value.dtype == D else value

    def finished(self, value: Tensor, native: Tensor, terms: int = 1, exact: Tensor | bool = False) -> Lanes:
        """A computed value, rounded to its native dtype (kind F: to float32 at most); ``exact`` float64 is not."""
        noise, dtype = self.noise, native.dtype
        if dtype.is_complex:
            pairs = torch.view_as_real(value.resolve_conj())
            stored = noise.rounded(pairs, torch.float32 if dtype == torch.complex64 else D)
            return Lanes(value, torch.view_as_complex(stored), terms)
        if dtype not in GRIDS:
            if dtype.is_floating_point:
                return Lanes(value, value.float().to(dtype).to(D), terms)
            # isfinite is a product of two bools, in float64 by the rule of products.
            value = value.to(dtype)
            return Lanes(value, value)
        if dtype == D:
            noisy = noise.rounded(value, dtype)
            if exact is not False:
                noisy = torch.where(torch.as_tensor(exact, device=value.device), value, noisy)
            return Lanes(noisy, noisy, terms)
        grid = torch.float32 if noise.kind == "F" else dtype
        return Lanes(value, noise.rounded(value, grid), terms)


def _adds_nan(lanes: Lanes | None, native: Any) -> bool:
    """Whether lanes are NaN where torch's own result is finite.

    The decomposition of `grid_sampler_2d` multiplies elements that it takes in place of those outside by 0.
    """
    return lanes is not None and bool((lanes.rounded.isnan().any(0) & native.isfinite()).any())


# What a rule may raise on unforeseen arguments: the operation then runs lane by lane, and is listed. ATen's
# decomposition of a mean's gradient divides by the number of elements, which may be 0.
REFUSED = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, ArithmeticError)


def run_on_lanes(call: Call, function: Callable[..., Any], pick: Callable[[Operand], Tensor]) -> list[Any] | None:
    """Results of ``function`` on the lanes that ``pick`` takes of a call's operands, each ``(L, *shape)``.

    In float64, else float32, else the native dtypes; None if none works or gives the call's shapes.
    """
    args, kwargs = call.on(pick)
    for dtype in (D, torch.float32, None):
        try:
            run = _in(dtype, function)
            made = results_of(each(run, *_typed(args, dtype, call.args), **_typed(kwargs, dtype, call.kwargs)))
            check_shapes(made, call.natives)
        except REFUSED as error:
            if out_of_memory(error):
                raise
            continue
        return [_widest(m) if isinstance(m, Tensor) else m for m in made]
    return None


def _widest(value: Tensor) -> Tensor:
    return value.to(torch.complex128) if value.is_complex() else value.to(D) if value.is_floating_point() else value


def on_copies(function: Any, names: Sequence[str]) -> Callable[..., tuple[Tensor, ...]]:
    """``function``, which writes the arguments ``names``, as one that returns them instead."""

    def call(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
        function(*args, **kwargs)
        arguments = named(function, args, kwargs)
        return tuple(tensors_of([arguments.get(name) for name in names]))

    return call


def results_of(out: Any) -> list[Any]:
    if isinstance(out, (tuple, list)):
        return [item for part in out for item in (part if isinstance(part, (tuple, list)) else (part,))]
    return [out]


def check_shapes(values: Sequence[Any], natives: Sequence[Any]) -> None:
    for value, native in zip(values, natives, strict=False):
        if isinstance(value, Tensor) and isinstance(native, Tensor) and value.shape[1:] != native.shape:
            raise ValueError(f"lanes have shape {tuple(value.shape[1:])}, the native result {tuple(native.shape)}")


def _typed(tree: Any, dtype: torch.dtype | None, natives: Any) -> Any:
    """Floating lanes in ``dtype``; None: in the dtype of their native counterparts."""
    if dtype is not None:
        return tree_map_only(Tensor, lambda t: t.to(dtype) if t.dtype == D else t, tree)
    return tree_map(lambda v, n: v.to(n.dtype) if isinstance(v, Tensor) and isinstance(n, Tensor) else v, tree, natives)


def _in(dtype: torch.dtype | None, func: Any) -> Any:
    """``func`` with narrower floating dtype arguments lifted to ``dtype``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            wide = dtype.to_complex()
            lifted = {**dict.fromkeys(GRIDS, dtype), torch.complex32: wide, torch.complex64: wide}
            args, kwargs = tree_map_only(torch.dtype, lambda d: lifted.get(d, d), (args, kwargs))
        return func(*args, **kwargs)

    return call
