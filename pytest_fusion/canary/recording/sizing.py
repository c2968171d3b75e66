"""The sizes of a spec's dims, solved from the shapes of a call's tensors."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_fusion.case import sizes as admissible
from pytest_fusion.case.make import ImpossibleCase
from pytest_fusion.spec.dims import Size, Term
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import TensorSpec

# A quotient or remainder is inverted by trying; no dim of a kernel is a hundred times another by a ``//``.
_TRIED = 128


class UnsolvedError(Exception):
    """The shapes of a call are not those of the spec, or leave a dim open. Says so in a clause."""


def solve(
    spec: FusionSpec,
    tensors: Mapping[str, tuple[TensorSpec, tuple[int, ...]]],
    hints: Mapping[str, int],
    unused: frozenset[str],
) -> dict[str, Size]:
    """A size for every dim of the spec.

    ``tensors`` are the inputs of the call with their shapes. A dim that none of them shows takes its ``hint`` (a plain
    argument of its name, a bound of recorded indices), the one size that it may have, or, where only the ``unused``
    dims of absent inputs are left, any that is allowed. Raises ``UnsolvedError``.
    """
    found: dict[str, Size] = {}
    equations: list[tuple[str, Term, int]] = []
    for name, (inner, shape) in tensors.items():
        equations += _equations(name, inner, shape, found)
    # Plain names first: an expression has one unknown less then.
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
    """One equation for each dimension; the sizes of a ``*batch`` are known at once."""
    terms = inner.shape.terms
    extra = len(shape) - sum(not term.batch for term in terms)
    if extra < 0 or (extra and not any(term.batch for term in terms)):
        raise UnsolvedError(f"{name!r} has {len(shape)} dimensions where the spec says {inner.shape.text!r}")
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
    """Whether nothing of this equation is open any more. Raises ``UnsolvedError`` where it does not hold."""
    unknown = [one for one in term.names if one not in found]
    if len(unknown) > 1:
        return False
    if unknown:
        solutions = _solutions(term, unknown[0], size, found)
        if len(solutions) != 1:
            if solutions:
                return False  # a quotient: another tensor may tell which
            raise UnsolvedError(f"{name!r} has a size of {size} where the spec says {term.text!r}")
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
    """The values of one dim that give this size, the least few of them."""

    def at(value: int) -> int | None:
        return _value(term, {**found, unknown: value})

    zero, one = at(0), at(1)
    candidates = [size] if zero is None or one is None or one == zero else [(size - zero) // (one - zero)]
    # 2*half, seq+1 and heads*width are straight lines; what is left is looked for around what a divisor makes of it.
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
