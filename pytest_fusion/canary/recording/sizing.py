"""`solve`: the sizes of a spec's dims from the shapes of a call's tensors."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_fusion.case import sizes as admissible
from pytest_fusion.case.make import ImpossibleCase
from pytest_fusion.spec.dims import Size, Term
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import TensorSpec

# Divisors that are tried to invert a quotient or remainder; dims of kernels have smaller ones.
_TRIED = 128


class UnsolvedError(Exception):
    """The shapes of a call do not fit the spec, or leave a dim undetermined; the message is a clause."""


def solve(
    spec: FusionSpec,
    tensors: Mapping[str, tuple[TensorSpec, tuple[int, ...]]],
    hints: Mapping[str, int],
    unused: frozenset[str],
) -> dict[str, Size]:
    """A size for every dim of the spec.

    ``tensors`` are the inputs of the call with their shapes. A dim that they do not determine takes its ``hint`` (a
    plain argument of its name, a bound of recorded indices), the only size that it may have, or, for the ``unused``
    dims of absent inputs, any allowed one. Raises ``UnsolvedError``.
    """
    found: dict[str, Size] = {}
    equations: list[tuple[str, Term, int]] = []
    for name, (inner, shape) in tensors.items():
        equations += _equations(name, inner, shape, found)
    # Plain names first, so that expressions have fewer unknowns.
    equations.sort(key=lambda one: one[1].names != (one[1].text,))
    before = -1
    while equations and len(equations) != before:
        before = len(equations)
        equations = [one for one in equations if not _solved(*one, found)]
    for name in spec.dim_order:
        if name in found:
            continue
        bound = spec.bound(name)
        wanted = hints.get(name, bound.min if bound.max == bound.min else None)
        if wanted is None and name in unused:
            wanted = max(bound.min, 1)
        if wanted is None:
            raise UnsolvedError(f"the size of {name!r} follows from no argument of the call")
        try:
            found[name] = admissible.fit(wanted, bound, found)
        except ImpossibleCase as error:
            raise UnsolvedError(f"{name!r} has no size: {error}") from None
    for name in spec.batch_names:
        if name not in found:
            if name not in unused:
                raise UnsolvedError(f"the sizes of '*{name}' follow from no argument of the call")
            found[name] = ()
    _check(tensors, found)
    return found


def _equations(
    name: str, inner: TensorSpec, shape: tuple[int, ...], found: dict[str, Size]
) -> list[tuple[str, Term, int]]:
    """One equation for each dimension; stores the sizes of a ``*batch`` at once."""
    terms = inner.shape.terms
    extra = len(shape) - sum(not term.batch for term in terms)
    if extra < 0 or (extra and not any(term.batch for term in terms)):
        raise UnsolvedError(f"{name!r} has {len(shape)} dimensions where the spec has {inner.shape.text!r}")
    equations, axis = [], 0
    for term in terms:
        if term.batch:
            batch = shape[axis : axis + extra]
            axis += extra
            if found.setdefault(term.names[0], batch) != batch:
                raise UnsolvedError(f"'*{term.names[0]}' is {found[term.names[0]]} and, in {name!r}, {batch}")
        else:
            equations.append((name, term, shape[axis]))
            axis += 1
    return equations


def _solved(name: str, term: Term, size: int, found: dict[str, Size]) -> bool:
    """Whether the equation is solved. Raises ``UnsolvedError`` where it does not hold."""
    unknown = [one for one in term.names if one not in found]
    if len(unknown) > 1:
        return False
    if unknown:
        solutions = _solutions(term, unknown[0], size, found)
        if len(solutions) != 1:
            if solutions:
                return False  # a quotient: another tensor may decide
            raise UnsolvedError(f"{name!r} has a size of {size} where the spec has {term.text!r}")
        found[unknown[0]] = solutions[0]
    if _value(term, found) != size:
        raise UnsolvedError(f"{name!r} has a size of {size} where {term.text!r} is {_value(term, found)}")
    return True


def _value(term: Term, sizes: Mapping[str, Size]) -> int | None:
    try:
        return term.evaluate(sizes)[0]
    except ZeroDivisionError:
        return None


def _solutions(term: Term, unknown: str, size: int, found: Mapping[str, Size]) -> list[int]:
    """The smallest values of one dim that give this size, at most two."""

    def at(value: int) -> int | None:
        return _value(term, {**found, unknown: value})

    zero, one = at(0), at(1)
    candidates = [size] if zero is None or one is None or one == zero else [(size - zero) // (one - zero)]
    # 2*half, seq+1 and heads*width are linear; others are searched for around multiples of the size.
    if not any(value >= 0 and at(value) == size for value in candidates):
        divisors = [part for part in range(1, _TRIED + 1) if at(size * part) == size]
        candidates = [size * part + rest for part in divisors for rest in range(part)]
    fitting = sorted({value for value in candidates if value >= 0 and at(value) == size})
    return fitting[:2]


def _check(tensors: Mapping[str, tuple[TensorSpec, tuple[int, ...]]], found: Mapping[str, Size]) -> None:
    for name, (inner, shape) in tensors.items():
        try:
            made = inner.shape.evaluate(found)
        except ZeroDivisionError:
            made = ()
        if made != shape:
            raise UnsolvedError(f"{name!r} has the shape {shape} where {inner.shape.text!r} is {made}")
