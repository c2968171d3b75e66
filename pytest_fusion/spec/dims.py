"""Shape strings: ``"*batch rows 2*half"`` as a sequence of terms that a set of sizes turns into a shape."""

from __future__ import annotations

import ast
import contextlib
import keyword
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import SupportsIndex

from pytest_fusion.errors import SpecError
from pytest_fusion.spec.wording import checks_words

# A named size, or the sizes of a leading ``*batch``.
Size = int | tuple[int, ...]

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _evaluate(node: ast.expr, sizes: Mapping[str, Size]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            size = sizes[name]
            if not isinstance(size, int):
                raise SpecError(f"'*{name}' stands for several dimensions and cannot be used in an expression")
            return size
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, sizes), _evaluate(right, sizes))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, sizes)
    raise SpecError(f"unsupported expression {ast.unparse(node)!r} in a dim; use names, integers and + - * // %")


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a shape string; ``batch`` names a variable number of dimensions."""

    text: str
    names: tuple[str, ...]
    batch: bool = False

    def evaluate(self, sizes: Mapping[str, Size]) -> tuple[int, ...]:
        """The dimensions of this term. Raises ``ZeroDivisionError`` where an expression divides by a size of zero."""
        if self.batch or self.names == (self.text,):
            size = sizes[self.names[0]]
            return size if isinstance(size, tuple) else (size,)
        return (_evaluate(ast.parse(self.text, mode="eval").body, sizes),)


def _forbid_keywords(text: str, place: str) -> None:
    for word in re.findall(r"\w+", text):
        if keyword.iskeyword(word):
            raise SpecError(f"cannot read dim {text!r}{place}: {word!r} is a Python keyword; call it '{word}_'")


def parse_expression(text: str, *, where: str = "") -> Term:
    """Parse ``"2*half"``, ``"seq+1"``, ``"rows"`` or ``"4"``; raises ``SpecError``."""
    place = f" in {where}" if where else ""
    _forbid_keywords(text, place)
    try:
        body = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise SpecError(
            f"cannot read dim {text!r}{place}: expected a name, an integer or an expression without blanks"
        ) from None
    names = tuple(dict.fromkeys(node.id for node in ast.walk(body) if isinstance(node, ast.Name)))
    # A dry run on ones finds an unsupported operator at collection; only real sizes can show a zero divisor.
    with contextlib.suppress(ZeroDivisionError):
        _evaluate(body, dict.fromkeys(names, 1))
    return Term(ast.unparse(body), names)


@dataclass(frozen=True, slots=True)
class Shape:
    """A parsed shape string."""

    text: str
    terms: tuple[Term, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for term in self.terms for name in term.names))

    @property
    def batch_names(self) -> tuple[str, ...]:
        return tuple(term.names[0] for term in self.terms if term.batch)

    def evaluate(self, sizes: Mapping[str, Size]) -> tuple[int, ...]:
        return tuple(size for term in self.terms for size in term.evaluate(sizes))

    def axis_of(self, name: str, sizes: Mapping[str, Size]) -> int | None:
        """The axis of the plain dim ``name``, or ``None``."""
        axis = 0
        for term in self.terms:
            if not term.batch and term.text == name:
                return axis
            axis += len(term.evaluate(sizes))
        return None


def parse_shape(text: str) -> Shape:
    """Parse a jaxtyping-like shape string; ``""`` is a 0-d tensor. Raises ``SpecError``.

    ``_`` is a dim of its own (``_0``, ``_1``, ... until :func:`named_apart`), ``...`` a batch, and ``name=4`` a 4.
    """
    terms: list[Term] = []
    for position, token in enumerate(text.split()):
        own = f"_{position}"
        if token == "...":
            terms.append(Term(token, (own,), batch=True))
        elif token == "_":
            terms.append(Term(own, (own,)))
        elif token.startswith("*"):
            name = token[1:]
            if not name.isidentifier():
                raise SpecError(f"cannot read {token!r} in the shape {text!r}: '*' takes a name, as in '*batch'")
            _forbid_keywords(name, "")
            terms.append(Term(token, (name,), batch=True))
        elif token.startswith("#"):
            raise SpecError(
                f"broadcastable dims ({token!r} in the shape {text!r}) are not supported: "
                "write two specs, one with the dim and one with the integer 1"
            )
        elif "," in token:
            raise SpecError(f"cannot read {token!r} in the shape {text!r}: blanks alone part dims, as in 'rows n'")
        else:
            terms.append(parse_expression(token.partition("=")[2] or token))
    if sum(term.batch for term in terms) > 1:
        raise SpecError(f"the shape {text!r} has more than one '*' term; one is allowed")
    return Shape(text, tuple(terms))


def named_apart(shape: Shape, owner: str) -> Shape:
    """The shape with its anonymous dims named after their input, so that the ``_`` of two inputs are two dims."""

    def rename(term: Term) -> Term:
        if len(term.names) != 1 or term.names[0][:1] != "_" or not term.names[0][1:].isdigit():
            return term
        own = f"{owner}{term.names[0]}"
        return Term(term.text if term.batch else own, (own,), term.batch)

    return Shape(shape.text, tuple(map(rename, shape.terms)))


@dataclass(frozen=True, slots=True)
class Dim:
    """Bounds of a named size: ``min <= size <= max``, a multiple of ``multiple_of`` (a number or another dim)."""

    min: int = 0
    max: int | None = None
    multiple_of: int | str | None = None


@checks_words(SpecError)
def dim(min: int = 0, max: int | None = None, *, multiple_of: int | str | None = None) -> Dim:
    """Bounds of a named size, which hold together. Raises ``SpecError`` when no size satisfies them.

    >>> dim(1, 8192, multiple_of=8)
    Dim(min=1, max=8192, multiple_of=8)
    """
    for name, bound in (("min", min), ("max", max)):
        if not isinstance(bound, SupportsIndex) or isinstance(bound, bool):
            if bound is None and name == "max":
                continue
            hint = "; another dim's size can be named in multiple_of= alone" if isinstance(bound, str) else ""
            raise SpecError(f"dim({name}={bound!r}): expected an integer{hint}")
    if multiple_of is not None and (not isinstance(multiple_of, SupportsIndex | str) or isinstance(multiple_of, bool)):
        raise SpecError(f"dim(multiple_of={multiple_of!r}): expected an integer or the name of a dim")
    if min < 0:
        raise SpecError(f"dim(min={min}): a size cannot be negative; use min=0 or more")
    if max is not None and max < min:
        raise SpecError(f"dim({min}, {max}): no size is at least {min} and at most {max}")
    if isinstance(multiple_of, int):
        if multiple_of < 1:
            raise SpecError(f"dim(multiple_of={multiple_of}): expected 1 or more")
        first = -(-min // multiple_of) * multiple_of
        if max is not None and first > max:
            raise SpecError(f"dim({min}, {max}, multiple_of={multiple_of}): no multiple of {multiple_of} in that range")
    return Dim(min, max, multiple_of)
