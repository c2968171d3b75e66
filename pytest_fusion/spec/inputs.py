"""Input specs: a tensor, an optional, a derived value, a drawn one, or a constant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_fusion.errors import SpecError
from pytest_fusion.spec.dims import Shape, named_apart, parse_shape
from pytest_fusion.spec.dtypes import FLOATING, normalise_dtypes
from pytest_fusion.spec.values import ValueProfile, named_profile
from pytest_fusion.spec.wording import checks_words, did_you_mean

# The simplest first: shrinking goes to the left.
LAYOUTS: tuple[str, ...] = ("contiguous", "padded", "transposed", "step", "unflattenable", "expanded", "offset")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor input. ``dtypes`` is ``()`` for the case's floating dtype, else the names to draw from."""

    shape: Shape
    dtypes: tuple[str, ...] = ()
    values: ValueProfile | Callable[..., Any] | None = None
    layouts: tuple[str, ...] = LAYOUTS

    @property
    def follows_case_dtype(self) -> bool:
        return not self.dtypes

    @property
    def plainest(self) -> str:
        """The name of the plainest kind of its values in a case."""
        return self.values.names[0] if isinstance(self.values, ValueProfile) and self.values.choices else "unit"

    def may_float(self) -> bool:
        return not self.dtypes or any(name in FLOATING for name in self.dtypes)


@checks_words(SpecError)
def tensor(
    dims: str | int | Sequence[str | int],
    *,
    dtype: Any = None,
    values: ValueProfile | Callable[..., Any] | str | None = None,
    layouts: Sequence[str] | str | None = None,
) -> TensorSpec:
    """A tensor input. Raises ``SpecError``.

    ``dims`` is a shape string: names, integers, ``2*half``, ``seq+1``, a leading ``*batch``; ``""`` is 0-d. Equal names
    are equal sizes. ``dtype``: a torch dtype or a sequence to draw from; ``None`` is the case's floating dtype.
    ``values``: a profile of ``pytest_fusion.values``, the name of a plugin's profile, or a function of ``(shape, dtype,
    generator)`` that returns a tensor. ``layouts``: those that may be drawn.
    """
    if isinstance(dims, int):
        dims = str(dims)
    elif not isinstance(dims, str):
        dims = " ".join(str(part) for part in dims)
    shape = parse_shape(dims)
    if isinstance(layouts, str):
        layouts = (layouts,)
    chosen = LAYOUTS if layouts is None else tuple(layouts)
    for name in chosen:
        if name not in LAYOUTS:
            raise SpecError(f"tensor({dims!r}): unknown layout {name!r}{did_you_mean(str(name), LAYOUTS)}")
    if not chosen:
        raise SpecError(f"tensor({dims!r}): layouts=() leaves no layout to draw; drop it or name one of {LAYOUTS}")
    if isinstance(values, str):
        values = named_profile(values, f"tensor({dims!r}, values={values!r})")
    if values is not None and not isinstance(values, ValueProfile) and not callable(values):
        raise SpecError(
            f"tensor({dims!r}): values={values!r} is neither a profile of pytest_fusion.values nor a function of "
            "(shape, dtype, generator)"
        )
    if getattr(values, "__module__", None) == ValueProfile.__module__ and not isinstance(values, ValueProfile):
        called = f"values.{getattr(values, '__name__', '...')}"
        raise SpecError(
            f"tensor({dims!r}): values={called} is the function that makes a profile; call it: {called}(...)"
        )
    dtypes = () if dtype is None else normalise_dtypes(dtype, where=f"tensor({dims!r})")
    return TensorSpec(shape, dtypes, values, chosen)


@dataclass(frozen=True, slots=True)
class OptionalSpec:
    """An input that is ``None`` in some cases."""

    spec: InputSpec


@checks_words(SpecError)
def optional(spec: Any) -> OptionalSpec:
    """``None`` in some cases, ``spec`` in the others."""
    if isinstance(spec, OptionalSpec):
        raise SpecError("optional(optional(...)): one optional is enough")
    return OptionalSpec(as_input(spec))


@dataclass(frozen=True, slots=True)
class DerivedSpec:
    """An input computed from others; ``needs`` are the function's parameters, ``required`` those without a default."""

    function: Callable[..., Any]
    needs: tuple[str, ...]
    required: tuple[str, ...]


@checks_words(SpecError)
def derived(function: Callable[..., Any]) -> DerivedSpec:
    """Compute an input from what the function's parameters name: other inputs, dims, ``generator``, ``dtype``.

    ``dtype`` is the case's floating torch dtype, unless an input or a dim has that name. Parameters that name nothing
    must have a default, and keep it.
    """
    if not callable(function):
        raise SpecError(f"derived({function!r}): expected a function of other inputs, dims, 'generator' or 'dtype'")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        raise SpecError(
            f"derived({function!r}): a builtin does not name its parameters; wrap it: derived(lambda x: ...(x))"
        ) from None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = tuple(p.name for p in named if p.default is p.empty)
    return DerivedSpec(function, tuple(p.name for p in named), required)


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """An input drawn from a Hypothesis strategy."""

    strategy: Any


@dataclass(frozen=True, slots=True)
class ConstantSpec:
    """An input that is the same in every case."""

    value: Any


InputSpec = TensorSpec | OptionalSpec | DerivedSpec | StrategySpec | ConstantSpec


def as_input(value: Any, owner: str = "") -> InputSpec:
    """Classify what a user put into ``inputs=`` under the name ``owner``; anything unknown is a constant."""
    if isinstance(value, TensorSpec):
        return replace(value, shape=named_apart(value.shape, owner)) if owner else value
    if isinstance(value, OptionalSpec):
        return OptionalSpec(as_input(value.spec, owner))
    if isinstance(value, DerivedSpec | StrategySpec | ConstantSpec):
        return value
    if _is_strategy(value):
        return StrategySpec(value)
    drawn = TensorSpec | OptionalSpec | DerivedSpec
    if any(isinstance(inner, drawn) or _is_strategy(inner) for inner in _held(value)):
        raise SpecError(
            f"input {owner!r} is a {type(value).__name__} that holds tensor(...) or something else that is drawn; only "
            "an input by itself is. Name each one and put them together in the test and in the reference, or make all "
            "of them at once with derived(lambda rows, generator: [...])"
        )
    return ConstantSpec(value)


def _is_strategy(value: Any) -> bool:
    """Recognised without importing Hypothesis, which only `case/` does."""
    return any(b.__module__.startswith("hypothesis.") and b.__name__ == "SearchStrategy" for b in type(value).__mro__)


def _held(value: Any) -> Iterator[Any]:
    """The values in a list, tuple or dict, at any depth."""
    if isinstance(value, list | tuple | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield inner
            yield from _held(inner)


def unwrap(spec: InputSpec) -> InputSpec:
    """The spec inside an ``optional``."""
    return spec.spec if isinstance(spec, OptionalSpec) else spec


def may_index(declared: InputSpec) -> bool:
    """Whether an input may hold indices of another one: integers, or what a user's function computes."""
    inner = unwrap(declared)
    return isinstance(inner, DerivedSpec) or (isinstance(inner, TensorSpec) and not inner.may_float())
