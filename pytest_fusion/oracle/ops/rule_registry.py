"""How an operation is carried out on lanes: the context a rule works in, and the tables that rules enter."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from pytest_fusion.case.containers import tensors_of
from pytest_fusion.oracle.cancellation import again, unrounded
from pytest_fusion.oracle.lane_store import Lanes
from pytest_fusion.oracle.rounding import LARGEST32, U32, U64, D, Noise, unit

# A rule gets the operation's arguments with every tensor replaced by its lanes (L, *shape), L = 1 or 1 + K.
Rule = Callable[..., Any]
R = TypeVar("R", bound=Rule)

# Values before rounding; the mode rounds each result to its native dtype.
COMPUTED: dict[str, Rule] = {}
# Moves or selects values: done on the raw and on the rounded lanes alike, and never rounded.
EXACT: dict[str, Rule] = {}
# Rounds, compares or converts: done for real in every lane, on what an honest kernel would read there.
SEMANTIC: dict[str, Rule] = {}


@dataclass(slots=True)
class Op:
    """One operation in flight. Mappings and ``codes`` have the ``id`` of an operand's rounded values as key.

    ``function`` is the functional ATen overload, ``name`` its base name; ``outs`` and ``operands`` are native.
    ``terms``: the length of the longest product that made an operand.
    ``held``: the lanes of operands whose last rounding a kernel may leave out.
    ``low``: the 16-bit dtype of a product's factors, or the one they were converted from.
    ``sources``: the 16-bit dtype of the numbers that the factors were computed from. ``codes``: factors once integers.
    ``spread`` (*shape): set by a product of 16-bit factors, the error of rounding these once more; ``spreads`` has it
    for operands that are products themselves.
    ``made``: set by a product, its ``Lanes.terms`` where tensor cores truncate.
    ``eighths``: both factors may go to a GPU's tensor cores as float8.
    ``sizes`` (*shape): of a factor that is a sum, the root of its terms' squares.
    ``exact`` (bool, broadcastable to the result): where no kernel rounds the result; float64 has no finer reference.
    """

    noise: Noise
    function: Any
    name: str
    outs: tuple[Tensor, ...]
    operands: tuple[Any, ...]
    terms: int = 1
    held: Mapping[int, Lanes] = field(default_factory=dict)
    low: Mapping[int, torch.dtype] = field(default_factory=dict)
    sources: Mapping[int, torch.dtype] = field(default_factory=dict)
    codes: frozenset[int] = frozenset()
    spreads: Mapping[int, Tensor] = field(default_factory=dict)
    spread: Tensor | None = None
    made: int = 0
    eighths: bool = False
    sizes: Mapping[int, Tensor] = field(default_factory=dict)
    exact: Tensor | bool = False

    def unrounded(self, value: Tensor) -> Tensor:
        """An operand as a difference with a reduction of itself may read it: in half of the lanes not yet rounded."""
        lanes = self.held.get(id(value))
        return value if lanes is None else unrounded(lanes)

    def again(self, value: Tensor) -> Tensor:
        """An operand as a kernel that computes it a second time may have it then."""
        lanes = self.held.get(id(value))
        return value if lanes is None else again(lanes.raw, lanes.rounded)

    def named(self, args: Sequence[Any]) -> dict[str, Any]:
        """Positional arguments by the names of the native schema."""
        return {a.name: v for a, v in zip(self.function._schema.arguments, args, strict=False)}

    @property
    def wide(self) -> bool:
        """True when a result is float64."""
        return any(out.dtype == D for out in self.outs)

    @property
    def whole(self) -> bool:
        """True for integers and bools, which no operation rounds: noise just below one would make them others."""
        return not (self.outs[0].dtype.is_floating_point or self.outs[0].dtype.is_complex)

    @property
    def unit(self) -> float:
        """2^-24 for everything below float64: kernels and ATen alike compute low precision in float32."""
        return U64 if self.wide else U32

    @property
    def stored_unit(self) -> float:
        """Roundoff of an accumulation stored in memory, in the native dtype as written (kind E) or float32 (kind F)."""
        if self.noise.kind == "F" or not self.outs or not self.outs[0].dtype.is_floating_point:
            return self.unit
        return unit(self.outs[0].dtype)

    def relative(self, value: Tensor, units: float) -> Tensor:
        return self.noise.relative(value, units * self.unit)

    def number(self, value: Any, *, rest: bool = False) -> Any:
        """A Python number as kernels hold it: off by up to a unit, alike in all elements, unless float32 holds it.

        ``0.9 * a + 0.1 * b`` and ``a + 0.1 * (b - a)`` differ by that where they cancel. What is left of 1 beside
        another number, or by what the operation means (``rest``), a kernel computes of that: ``1 - 0.999`` in float32,
        as moments of Adam have it, is off by 1.3e-5 of itself.
        """
        if not isinstance(value, float) or self.wide or not math.isfinite(value):
            return value
        held = struct.unpack("f", struct.pack("f", value))[0] if abs(value) < LARGEST32 else math.inf
        if held == value:
            return value
        left = (rest or self.noise.leaves(value)) and 0 < value < 0.5
        return self.relative(self.outs[0].new_full((1,), value, dtype=D), max(1.0, 0.5 / value) if left else 1)

    def absolute(self, value: Tensor, units: float) -> Tensor:
        return self.noise.absolute(value, units * self.unit)

    def accumulated(
        self,
        total: Tensor,
        squares: Tensor,
        terms: float | Tensor,
        magnitude: Callable[[], Tensor] | None = None,
        unit_roundoff: float | None = None,
    ) -> Tensor:
        """A sum with the rounding of a float accumulator; ``magnitude`` is only called where overflow is near."""
        if not isinstance(terms, Tensor) and terms <= 1:
            return total
        near = magnitude is not None and not self.wide and bool((squares * terms > LARGEST32**2).any())
        size = magnitude() if magnitude is not None and near else None
        return self.noise.accumulated(total, squares, terms, unit_roundoff or self.unit, size)

    def carried(self, total: Tensor, size: Tensor, terms: int) -> Tensor:
        """``total`` (L, *shape) of an accumulator that began with a bias and held ``size`` (*shape) in all its steps.

        Each step rounds at that magnitude: a variance of ``u^2 size^2 / 3`` times 0.54, the mean square of the power
        of two below a number over the number.
        """
        deviation = torch.where(torch.isfinite(size), size, 0.0) * (self.unit * math.sqrt(terms / 5.5))
        out = self.noise.spread(total)
        out[1:].add_(deviation * self.noise.normal(tuple(out.shape[1:]), out.device))
        return out


def computed(*names: str) -> Callable[[R], R]:
    return _enter(COMPUTED, names)


def exact(*names: str) -> Callable[[R], R]:
    return _enter(EXACT, names)


def semantic(*names: str) -> Callable[[R], R]:
    return _enter(SEMANTIC, names)


def _enter(table: dict[str, Rule], names: Sequence[str]) -> Callable[[R], R]:
    def enter(rule: R) -> R:
        for name in names:
            table[name] = rule
        return rule

    return enter


def rank(value: Tensor) -> int:
    """Rank of the native tensor behind lanes ``value``."""
    return value.dim() - 1


def from_end(dim: int, of: int) -> int:
    """``dim`` counted from the end, so that it means the same with a lane dimension in front."""
    return dim if dim < 0 else dim - max(of, 1)


def dims_from_end(dim: int | Sequence[int] | None, of: int) -> list[int]:
    """The dims of a reduction, from the end; None or empty means all of ``of`` dims, as ATen has it."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(-of, 0))
    every = [dim] if isinstance(dim, int) else list(dim)
    return [from_end(d, of) for d in every] if of else []


def count(value: Tensor, dims: Sequence[int]) -> int:
    return math.prod(value.shape[d] for d in dims)


def aligned(op: Op, values: Sequence[Any]) -> list[Any]:
    """Tensors among ``values`` with equal rank, so that lanes meet lanes when they broadcast; on one device."""
    ranks = [rank(v) for v in values if isinstance(v, Tensor)]
    top = max(ranks, default=0)
    device = op.outs[0].device if op.outs else None
    ready: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            missing = top - rank(value)
            if missing:
                value = value.reshape(value.shape[0], *(1,) * missing, *value.shape[1:])
            if device is not None and value.device != device:
                value = value.to(device)
        ready.append(value)
    return ready


@overload
def as_float(value: Tensor) -> Tensor: ...
@overload
def as_float(value: Any) -> Any: ...
def as_float(value: Any) -> Any:
    """Integer and bool lanes as float64, so that integer division and promotion do not fall back to float32."""
    return value.to(D) if isinstance(value, Tensor) and value.dtype != D else value


def named(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an ATen overload by the names of its schema, as far as they are given."""
    return {a.name: v for a, v in zip(function._schema.arguments, args, strict=False)} | kwargs


def single(value: Tensor) -> Tensor:
    """Lane 0 alone, ``(1, *shape)``."""
    return value[:1]


def each(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs ``function`` lane by lane and stacks what it returns; for operations without a batched form."""
    width = max((v.shape[0] for v in tensors_of((args, kwargs))), default=1)
    results = [function(*_lane(args, i), **_lane(kwargs, i)) for i in range(width)]
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    if isinstance(results[0], (tuple, list)):
        return tuple(
            torch.stack(parts) if isinstance(parts[0], Tensor) else parts[0] for parts in zip(*results, strict=True)
        )
    return results[0]


def _lane(tree: Any, index: int) -> Any:
    if isinstance(tree, Tensor):
        return tree[index if tree.shape[0] > 1 else 0]
    if isinstance(tree, dict):
        return {k: _lane(v, index) for k, v in tree.items()}
    if isinstance(tree, (tuple, list)):
        return (
            type(tree)([_lane(v, index) for v in tree])
            if type(tree) in (tuple, list)
            else [_lane(v, index) for v in tree]
        )
    return tree
