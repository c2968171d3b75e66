"""What is known about an ATen operation before it runs: which arguments it writes, which rule carries it out."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pytest_fusion.oracle.lane_result import Drawn
from pytest_fusion.oracle.ops import COMPUTED, EXACT, SEMANTIC, VIEWS, Rule

FACTORIES = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
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
    draws: bool
    composite: bool
    functional: Any


@functools.lru_cache(maxsize=2048)
def plan_of(function: Any) -> Plan:
    schema = function._schema
    namespace, _, name = schema.name.partition("::")
    written = tuple(
        (position, argument.name) for position, argument in enumerate(schema.arguments) if _is_written(argument)
    )
    outs = bool(written) and all(schema.arguments[position].kwarg_only for position, _ in written)
    base = name
    if written and not outs and name.endswith("_") and not name.endswith("__"):
        base = name[:-1]
    if name.startswith("__i") and name.endswith("__"):
        base = "__" + name[3:]
    aliased = [result.alias_info for result in schema.returns]
    view = namespace == "aten" and (
        name in VIEWS or (not written and bool(aliased) and all(a is not None and not a.is_write for a in aliased))
    )
    ours = namespace == "aten"
    rule = (EXACT.get(base) or SEMANTIC.get(base) or COMPUTED.get(base)) if ours else None
    return Plan(
        name=base if ours else schema.name,
        view=view,
        written=written,
        outs=outs,
        rule=rule,
        exact=ours and base in EXACT,
        semantic=ours and base in SEMANTIC,
        draws=torch.Tag.nondeterministic_seeded in function.tags,
        composite=_composite(function),
        functional=_functional(function, namespace, base, outs, bool(written)),
    )


def drawn_by(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Drawn:
    """Whose numbers an operation that draws has taken."""
    passed = any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))
    return Drawn.PASSED if passed else Drawn.OWN


def _composite(function: Any) -> bool:
    return bool(function._can_decompose()) and bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")
    )


def _functional(function: Any, namespace: str, base: str, outs: bool, written: bool) -> Any:
    """The overload that returns what ``function`` writes; None when there is none."""
    if not written:
        return function
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if packet is None:
        return None
    wanted = [(a.name, str(a.type)) for a in function._schema.arguments if not (outs and _is_written(a))]
    for overload in packet.overloads():
        found = getattr(packet, overload)
        schema = found._schema
        if not schema.is_mutable and [(a.name, str(a.type)) for a in schema.arguments] == wanted:
            return found
    return None


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


@functools.lru_cache(maxsize=1)
def decompositions() -> Any:
    """ATen's own decompositions; importing them takes a second, so it happens at the first unknown operation."""
    from torch._decomp import decomposition_table

    return decomposition_table
