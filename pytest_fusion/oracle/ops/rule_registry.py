"""The table of ATen operators, and what their rules work with."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from pytest_fusion.case.containers import tensors_of
from pytest_fusion.oracle.rounding import LARGEST32, U32, U64, D, Noise

# A rule gets the operation's arguments with every tensor replaced by its lanes (L, *shape), L = 1 or 1 + K.
Rule = Callable[..., Any]
R = TypeVar("R", bound=Rule)


@dataclass(frozen=True, slots=True)
class Operator:
    """What is known of an ATen operator by its name: the rule that carries it out on lanes, and its kind.

    A ``rule`` computes values before rounding; each result is then rounded to its native dtype. ``exact``: it moves or
    selects values, raw and rounded lanes alike, without rounding. ``semantic``: it rounds, compares or converts, for
    real in every lane, on what an honest kernel would read. With ``operands`` it gets an `Operand` for each tensor.
    """

    rule: Rule | None = None
    exact: bool = False
    semantic: bool = False
    operands: bool = False
    # A constant, usually in the shape of the argument.
    constant: bool = False
    casts: bool = False
    # Changes complex numbers only by the result's dtype.
    moves: bool = False
    # Exact for real numbers; for complex ones a root of two squares, or divided by it.
    modulus: bool = False
    # Does not read what it writes.
    overwrites: bool = False
    # Positions of the running statistics, which it writes against its schema.
    updates: tuple[int, ...] = ()
    sums: bool = False
    # May carry on a chain of additions, element by element.
    carries: bool = False
    # The last two operands are the factors of a product; ``product``: there are no others.
    factors: bool = False
    product: bool = False
    # Selects places by masks, which lanes share.
    places: bool = False
    # Maps float8 numbers to float8 numbers, up to a factor.
    scales: bool = False
    largest: bool = False
    # May return any of several equal values.
    unordered: bool = False


OPERATORS: dict[str, Operator] = {}


def enter(names: str, **facts: Any) -> None:
    """Add facts about each of the ``names``."""
    for name in names.split():
        OPERATORS[name] = replace(OPERATORS.get(name, Operator()), **facts)


enter("full scalar_tensor full_like zeros_like ones_like new_zeros new_ones new_full", constant=True)
enter("_to_copy copy", casts=True)
enter("_to_copy copy clone complex fill zero", moves=True)
enter("abs sgn", modulus=True)
enter("copy fill zero", overwrites=True)
enter("native_batch_norm cudnn_batch_norm miopen_batch_norm", updates=(3, 4))
enter("add sub rsub", sums=True)
enter("where mul", carries=True)
enter("mm bmm", product=True)
enter("mm bmm addmm baddbmm", factors=True)
enter("index_put _index_put_impl _unsafe_index_put", places=True)
enter("mul div clone neg", scales=True)
enter("amax max", largest=True)
enter("topk sort argsort kthvalue median nanmedian mode", unordered=True)


@dataclass(slots=True)
class Op:
    """One operation in flight: the functional overload ``function``, its base ``name``, native ``args`` and ``outs``.

    ``terms``: the length of the longest product that made an operand. A rule may set ``spread`` (*shape), the error of
    rounding a product's 16-bit factors once more; ``made``, a product's ``Lanes.terms`` where tensor cores truncate;
    and ``exact`` (bool, broadcastable to the result), where no kernel rounds although float64 has no finer reference.
    """

    noise: Noise
    function: Any
    name: str
    outs: tuple[Tensor, ...]
    args: tuple[Any, ...]
    terms: int = 1
    spread: Tensor | None = None
    made: int = 0
    exact: Tensor | bool = False

    @property
    def wide(self) -> bool:
        """Whether a result is float64."""
        return any(out.dtype == D for out in self.outs)

    @property
    def unit(self) -> float:
        """2^-24 below float64: kernels and ATen compute low precision in float32."""
        return U64 if self.wide else U32

    def relative(self, value: Tensor, units: float) -> Tensor:
        return self.noise.relative(value, units * self.unit)

    def number(self, value: Any, *, rest: bool = False) -> Any:
        """A Python number as kernels hold it: off by up to a unit, the same in all elements, unless float32 holds it.

        ``0.9 * a + 0.1 * b`` and ``a + 0.1 * (b - a)`` differ by that where they cancel. A number that is 1 minus
        another, or is by meaning (``rest``), may be computed: ``1 - 0.999`` in float32, as for Adam's moments, has a
        relative error of 1.3e-5.
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
        """A sum rounded by a float accumulator; ``magnitude`` is only called near overflow."""
        if not isinstance(terms, Tensor) and terms <= 1:
            return total
        near = magnitude is not None and not self.wide and bool((squares * terms > LARGEST32**2).any())
        size = magnitude() if magnitude is not None and near else None
        return self.noise.accumulated(total, squares, terms, unit_roundoff or self.unit, size)

    def carried(self, total: Tensor, size: Tensor, terms: int) -> Tensor:
        """``total`` (L, *shape) of an accumulator that began with a bias and had ``size`` (*shape) at each step."""
        # Each step rounds at that magnitude, with variance ``u^2 size^2 / 3`` times 0.54, the mean square of the power
        # of two below a number over the number.
        return self.noise.scattered(total, size * (self.unit * math.sqrt(terms / 5.5)))


def computed(names: str, **facts: Any) -> Callable[[R], R]:
    """Enter a function as the rule of the ``names``."""

    def entered(rule: R) -> R:
        enter(names, rule=rule, **facts)
        return rule

    return entered


def pointwise(names: str, *, numbers: bool = False) -> Callable[[R], R]:
    """Enter a function of float64 tensors with equal ranks on one device; ``numbers`` are as kernels hold them."""

    def entered(function: R) -> R:
        def rule(op: Op, *args: Any, **kwargs: Any) -> Any:
            held = [op.number(value) for value in args] if numbers else args
            return function(op, *map(as_float, aligned(op, held)), **kwargs)

        enter(names, rule=rule)
        return function

    return entered


exact = functools.partial(computed, exact=True)
semantic = functools.partial(computed, semantic=True)


def rank(value: Tensor) -> int:
    """Rank of the native tensor behind lanes ``value``."""
    return value.dim() - 1


def from_end(dim: int, of: int) -> int:
    """``dim`` counted from the end, so that a leading lane dimension does not change it."""
    return dim if dim < 0 else dim - max(of, 1)


def dims_from_end(dim: int | Sequence[int] | None, of: int) -> list[int]:
    """The dims of a reduction from the end; None or empty means all ``of`` dims, as in ATen."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(-of, 0))
    every = [dim] if isinstance(dim, int) else list(dim)
    return [from_end(d, of) for d in every] if of else []


def count(value: Tensor, dims: Sequence[int]) -> int:
    return math.prod(value.shape[d] for d in dims)


def aligned(op: Op, values: Sequence[Any]) -> list[Any]:
    """Tensors among ``values`` with equal rank and device, so that lanes broadcast with lanes."""
    top = max((rank(v) for v in values if isinstance(v, Tensor)), default=0)
    device = op.outs[0].device
    return [
        v.reshape(v.shape[0], *(1,) * (top - rank(v)), *v.shape[1:]).to(device) if isinstance(v, Tensor) else v
        for v in values
    ]


@overload
def as_float(value: Tensor) -> Tensor: ...
@overload
def as_float(value: Any) -> Any: ...
def as_float(value: Any) -> Any:
    """Integer and bool lanes as float64: integer division and promotion would give float32."""
    return value.to(D) if isinstance(value, Tensor) and value.dtype != D else value


def named(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Given arguments of an ATen overload by their names in its schema."""
    return {a.name: v for a, v in zip(function._schema.arguments, args, strict=False)} | kwargs


def each(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function`` lane by lane and stack the results, for operations without a batched form."""
    width = max((v.shape[0] for v in tensors_of((args, kwargs))), default=1)
    results = [function(*own[0], **own[1]) for own in (_lane((args, kwargs), index) for index in range(width))]
    return tree_map(lambda *parts: torch.stack(parts) if isinstance(parts[0], Tensor) else parts[0], *results)


def _lane(tree: Any, index: int) -> Any:
    return tree_map_only(Tensor, lambda value: value[index if value.shape[0] > 1 else 0], tree)
