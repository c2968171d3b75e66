"""What is known about an ATen operation before it runs: which arguments it writes, which rule carries it out."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pytest_fusion.interpreter.bridge.aten import has_kernel, schema
from pytest_fusion.oracle.lane_result import Drawn
from pytest_fusion.oracle.ops import COMPUTED, EXACT, SEMANTIC, Rule

# Constants, most in the shape of their argument.
CONSTANTS = frozenset(
    {"full", "scalar_tensor", "full_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_full"}
)


@dataclass(frozen=True, slots=True)
class Plan:
    """``written`` holds (position, name) of the arguments that are written; ``functional`` is the overload without.

    ``outs`` says that they are ``out=`` arguments, ``draws`` that the operation may draw random numbers,
    ``composite`` that it is made of others in all dispatch keys.
    """

    name: str
    view: bool
    written: tuple[tuple[int, str], ...]
    outs: bool
    rule: Rule | None
    exact: bool
    semantic: bool
    empty: bool
    draws: bool
    composite: bool
    functional: Any


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
    rule = (EXACT.get(base) or SEMANTIC.get(base) or COMPUTED.get(base)) if ours else None
    return Plan(
        name=base if ours else function._schema.name,
        view=ours and facts.view,
        written=written,
        outs=outs,
        rule=rule,
        exact=ours and base in EXACT,
        semantic=ours and base in SEMANTIC,
        empty=facts.empty,
        draws=facts.draws,
        composite=_composite(function),
        functional=_functional(function, facts.namespace, base, outs, dict(written)),
    )


def drawn_by(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Drawn:
    """Whose numbers an operation that draws has taken."""
    passed = any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))
    return Drawn.PASSED if passed else Drawn.OWN


def _composite(function: Any) -> bool:
    return bool(function._can_decompose()) and has_kernel(function, "CompositeImplicitAutograd")


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
    """ATen's own decompositions; importing them takes a second, so it happens at the first unknown operation."""
    from torch._decomp import decomposition_table

    return decomposition_table
