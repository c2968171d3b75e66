"""Launch arguments -> `Specialisation`, by the code of Triton's own launcher; for interpreted kernels too.

Touches ``KernelParam`` and ``create_function_from_signature`` of ``triton.runtime.jit``, and ``fn``, ``params`` and
``kwargs`` of a kernel: the same in 3.6.0, 3.7.1 and 3.9.0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pytest_fusion.run.measure.resources.function_places import NotFoundError, encode, place_of
from pytest_fusion.run.measure.resources.specialisation import Argument, Json, Place, Specialisation

# Triton specialises alike for every compute capability (only AMD's backend has other rules).
_ANY = 90
_PLAIN = (bool, int, float, str)


@cache
def _backend() -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    return make_backend(GPUTarget("cuda", _ANY, 32))


@cache
def _binder(kernel: Any) -> Any:
    from triton.runtime import jit

    return jit.create_function_from_signature(inspect.signature(kernel.fn), _parameters(kernel), _backend())


def _parameters(kernel: Any) -> list[Any]:
    from triton.runtime import jit

    parameters = getattr(kernel, "params", None)
    if parameters is not None:
        return list(parameters)
    # An interpreted kernel has only the arguments of its decorator.
    never = kernel.kwargs.get("do_not_specialize") or ()
    unaligned = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
    return [
        jit.KernelParam(i, parameter, i in never or name in never, i in unaligned or name in unaligned)
        for i, (name, parameter) in enumerate(inspect.signature(kernel.fn).parameters.items())
    ]


@cache
def constants_of(kernel: Any) -> frozenset[str]:
    """The names of a kernel's compile-time parameters."""
    return frozenset(parameter.name for parameter in _parameters(kernel) if parameter.is_constexpr)


@dataclass(frozen=True, slots=True)
class Live:
    """A kernel of this process and its binder's result: all that compiling it needs, functions included."""

    kernel: Any
    bound: dict[str, Any]
    specialised: list[tuple[Any, Any]]
    options: dict[str, Any]


def bind(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Live:
    """The arguments of a launch as Triton's own binder sees them. Raises ``NotFoundError`` if Triton rejects them."""
    try:
        bound, specialised, options = _binder(kernel)(*args, **kwargs)
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        raise NotFoundError(f"Triton does not specialise these arguments: {error}") from error
    given = {name: value for name, value in options.items() if name not in bound}
    if getattr(kernel, "debug", None) or getattr(kernel, "kwargs", {}).get("debug"):
        given.setdefault("debug", True)
    return Live(kernel, dict(bound), list(specialised), given)


def without_values(live: Live) -> Live:
    """The launch with its constants only: it holds no tensor's memory."""
    values = zip(live.bound.items(), live.specialised, strict=True)
    return replace(live, bound={name: _constants(kind[0], value) for (name, value), kind in values})


def specialise(live: Live, *, strict: bool = True) -> Specialisation:
    """The compilation that a launch of a kernel (interpreted or compiled) needs, as plain data.

    What another process cannot find raises ``NotFoundError``; unless ``strict``, its name stands for it.
    """
    kernel, encoded = live.kernel, encode if strict else _named
    return Specialisation(
        kernel=str(kernel.fn.__name__),
        place=place_of(kernel) if strict else _definition(kernel.fn),
        arguments=tuple(
            Argument(name, *_described(live.specialised[i], value, encoded))
            for i, (name, value) in enumerate(live.bound.items())
        ),
        options={name: encoded(value) for name, value in sorted(live.options.items())},
        globals=read_globals(kernel.fn),
    )


def _named(value: Any) -> Json:
    try:
        return encode(value)
    except NotFoundError:
        return {"opaque": str(getattr(value, "__name__", value))}


def _definition(function: Any) -> Place:
    code = function.__code__
    return Place(str(function.__module__), str(function.__qualname__), code.co_filename, code.co_firstlineno)


def _described(specialised: tuple[Any, Any], value: Any, encoded: Callable[[Any], Json]) -> tuple[Json, Json, Json]:
    type_, hint = specialised
    if type_ == "constexpr":
        return "constexpr", None, encoded(value)
    return encode(type_), encode(_texts(hint)), encoded(_constants(type_, value))


def _texts(hint: Any) -> Any:
    """Hints without the constants among those of a tuple."""
    if isinstance(hint, tuple):
        items = [_texts(item) for item in hint]
        return type(hint)(*items) if hasattr(hint, "_fields") else tuple(items)
    return hint if isinstance(hint, str) else None


def _constants(type_: Any, value: Any) -> Any:
    """The constants inside a tuple, ``None`` for the others."""
    if isinstance(type_, tuple):
        items = [_constants(kind, item) for kind, item in zip(type_, value, strict=True)]
        return type(type_)(*items) if hasattr(type_, "_fields") else tuple(items)
    return value if type_ == "constexpr" else None


def read_globals(function: Any) -> dict[str, Json]:
    """The plain module variables that a kernel's code names: numbers, strings, constexprs."""
    found: dict[str, Json] = {}
    for name in sorted(set(function.__code__.co_names)):
        value = function.__globals__.get(name)
        value = value.value if type(value).__name__ == "constexpr" else value
        if type(value) in _PLAIN:
            found[name] = encode(value)
    return found
