"""What is known about an overload before it runs: the arguments that it writes, and its operator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from pytest_fusion.interpreter.bridge.dispatch import has_kernel, schema
from pytest_fusion.oracle.lane_result import Drawn
from pytest_fusion.oracle.operand import Operand
from pytest_fusion.oracle.ops import OPERATORS, Operator


@dataclass(frozen=True, slots=True)
class Plan:
    """``written`` has (position, name) of written arguments; ``functional`` is the overload that returns them instead.

    ``outs``: they are ``out=``. ``draws``: it may draw random numbers. ``composite``: it is made of other operations.
    """

    name: str
    view: bool
    written: tuple[tuple[int, str], ...]
    outs: bool
    operator: Operator
    empty: bool
    draws: bool
    composite: bool
    functional: Any


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the functional overload ``func`` with native arguments that returned ``natives``.

    ``operands`` has an `Operand` for each tensor among the arguments; ``tree`` is the arguments with these in place.
    """

    func: Any
    plan: Plan
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    natives: list[Any]
    operands: list[Operand]
    tree: tuple[Any, Any]

    def on(self, pick: Callable[[Operand], Any]) -> tuple[Any, Any]:
        """Its arguments with what ``pick`` takes of each operand."""
        picked: tuple[Any, Any] = tree_map_only(Operand, pick, self.tree)
        return picked


@functools.lru_cache(maxsize=2048)
def plan_of(function: Any) -> Plan:
    facts = schema(function)
    name, written = facts.name, facts.writes
    outs = bool(written) and all(function._schema.arguments[position].kwarg_only for position, _ in written)
    base = name
    if written and not outs and name.endswith("_") and not name.endswith("__"):
        base = name[:-1]
    if name.startswith("__i") and name.endswith("__"):
        base = "__" + name[3:]
    ours = facts.namespace == "aten"
    return Plan(
        name=base if ours else function._schema.name,
        view=ours and facts.view,
        written=written,
        outs=outs,
        operator=(OPERATORS.get(base) if ours else None) or Operator(),
        empty=facts.empty,
        draws=facts.draws,
        composite=bool(function._can_decompose()) and has_kernel(function, "CompositeImplicitAutograd"),
        functional=_functional(function, facts.namespace, base, outs, dict(written)),
    )


def drawn_by(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Drawn:
    """Which generator an operation that draws used."""
    passed = any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))
    return Drawn.PASSED if passed else Drawn.OWN


def _functional(function: Any, namespace: str, base: str, outs: bool, written: Mapping[int, str]) -> Any:
    """The overload that returns what ``function`` writes; None when there is none."""
    if not written:
        return function
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if packet is None:
        return None
    arguments = enumerate(function._schema.arguments)
    wanted = [(a.name, str(a.type)) for i, a in arguments if not (outs and i in written)]
    for overload in packet.overloads():
        found = getattr(packet, overload)
        if not schema(found).writes and [(a.name, str(a.type)) for a in found._schema.arguments] == wanted:
            return found
    return None


@functools.lru_cache(maxsize=1)
def decompositions() -> Any:
    """ATen's own decompositions; importing them takes a second, so only the first unknown operation does."""
    from torch._decomp import decomposition_table

    return decomposition_table
