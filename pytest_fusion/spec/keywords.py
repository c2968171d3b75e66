"""Keywords of a spec in one form each; a value that a keyword cannot take is refused with an example."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from typing import Any, SupportsIndex

from pytest_fusion.errors import SpecError
from pytest_fusion.spec.dims import Dim, dim


def names(value: Any, where: str, keyword: str) -> tuple[str, ...]:
    """One name or several; ``None`` is no name."""
    if value is None:
        return ()
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(name, str) for name in found):
        raise SpecError(f"{where}: {keyword}={value!r}; expected a name or several, such as {keyword}=('x', 'y')")
    return found


def exception_types(value: Any, where: str) -> tuple[type[BaseException], ...]:
    """One type of exception or several; ``None`` is no type."""
    if value is None:
        return ()
    found = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | type) else (value,)
    for kind in found:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise SpecError(
                f"{where}: rejects={kind!r} is not an exception type; expected one or several, such as ValueError"
            )
    return found


def count(value: Any, where: str, keyword: str) -> int | None:
    """A whole number of 0 or more, or ``None``."""
    if value is None:
        return None
    if not isinstance(value, SupportsIndex) or isinstance(value, bool) or index(value) < 0:
        raise SpecError(f"{where}: {keyword}={value!r}; expected a whole number of 0 or more")
    return index(value)


def reasons(value: Any, where: str, keyword: str, example: str) -> dict[str, str]:
    """Why each of some checks is left out, or each of some findings accepted; every report repeats the reason."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SpecError(f"{where}: {keyword}={value!r}; expected a dict from names to reasons, such as {example}")
    for check, reason in value.items():
        if not isinstance(reason, str) or not reason.strip():
            raise SpecError(
                f"{where}: {keyword}={{{check!r}: {reason!r}}} gives no reason; say why in words, which reports repeat"
            )
    return dict(value)


def stated_inputs(value: Any, where: str) -> dict[str, Any]:
    """The specs in ``inputs=`` by name; it may be empty, as annotations may state the rest."""
    if value and not isinstance(value, Mapping):
        raise SpecError(f"{where}: inputs= is a {type(value).__name__}; expected a dict from names to inputs")
    return dict(value or {})


def inputs(value: Any, where: str) -> dict[str, Any]:
    """Inputs by name, one at least."""
    stated = stated_inputs(value, where)
    if not stated:
        raise SpecError(
            f"{where}: no inputs; pass inputs={{'x': tensor('rows hidden'), ...}} or annotate the test's "
            "parameters with jaxtyping, as in x: Float[Tensor, 'rows hidden']"
        )
    for name in stated:
        if not isinstance(name, str):
            raise SpecError(f"{where}: inputs={{{name!r}: ...}}; expected the name of a parameter")
    return stated


def entries(value: Any) -> tuple[Any, ...]:
    """Sizes to measure, one after the other; what each of them is, who measures them knows."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, Mapping | str) else (value,)


def bounds(value: Any, where: str) -> dict[str, Dim]:
    """Bounds of dims by name."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SpecError(f"{where}: dims={value!r}; expected a dict from names to bounds, as in {{'rows': dim(min=1)}}")
    return {name: _bound(name, bound) for name, bound in value.items()}


def _bound(name: str, bound: Any) -> Dim:
    if isinstance(bound, Dim):
        return dim(bound.min, bound.max, multiple_of=bound.multiple_of)
    if isinstance(bound, int) and not isinstance(bound, bool):
        return dim(bound, bound)
    raise SpecError(f"dims={{{name!r}: {bound!r}}}: expected dim(min, max, multiple_of=...) or one integer")
