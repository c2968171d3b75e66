"""Launch arguments -> `Specialisation`, by the code of Triton's own launcher; for interpreted kernels too.

Touches ``KernelParam`` and ``create_function_from_signature`` of ``triton.runtime.jit``, and ``fn``, ``params`` and
``kwargs`` of a kernel: the same in 3.6.0, 3.7.1 and 3.9.0.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType
from typing import Any

from pytest_fusion.case import value_json
from pytest_fusion.run.measure.resources.specialisation import Argument, Json, Place, Specialisation

# Triton specialises alike for every compute capability (only AMD's backend has other rules).
_ANY = 90
_PLAIN = (bool, int, float, str)
# An autotuner around heuristics around a kernel is three.
_MOST_WRAPPED = 8


class NotSpecialisedError(Exception):
    """Triton refuses to specialise the arguments of a launch; the text says why."""


def unwrapped(value: Any) -> Any:
    """The function that a kernel, or anything of Triton's around one, was made from; the value itself otherwise."""
    for _ in range(_MOST_WRAPPED):
        if not str(type(value).__module__).startswith("triton.") or not hasattr(value, "fn"):
            break
        value = value.fn
    return value


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
    """The arguments of a launch as Triton's own binder sees them. Raises ``NotSpecialisedError`` if it refuses them."""
    try:
        bound, specialised, options = _binder(kernel)(*args, **kwargs)
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        raise NotSpecialisedError(f"Triton does not specialise these arguments: {error}") from error
    given = {name: value for name, value in options.items() if name not in bound}
    if getattr(kernel, "debug", None) or getattr(kernel, "kwargs", {}).get("debug"):
        given.setdefault("debug", True)
    return Live(kernel, dict(bound), list(specialised), given)


def without_values(live: Live) -> Live:
    """The launch with its constants only: it holds no tensor's memory."""
    values = zip(live.bound.items(), live.specialised, strict=True)
    return replace(live, bound={name: _constants(kind[0], value) for (name, value), kind in values})


def specialise(live: Live) -> Specialisation:
    """The compilation that a launch of a kernel (interpreted or compiled) needs, as plain data."""
    code = live.kernel.fn.__code__
    return Specialisation(
        kernel=str(live.kernel.fn.__name__),
        place=Place(code.co_filename, code.co_firstlineno),
        arguments=tuple(
            Argument(name, *_described(live.specialised[i], value))
            for i, (name, value) in enumerate(live.bound.items())
        ),
        options={name: _encoded(value) for name, value in sorted(live.options.items())},
        globals=read_globals(live.kernel.fn),
    )


def _encoded(value: Any) -> Json:
    """JSON that differs where the compiler sees another value; functions by their names."""
    return value_json.encode(value, _special, lambda other: {"opaque": str(getattr(other, "__name__", other))})


def _special(value: Any) -> Any:
    """JSON for what drawn values never are; ``NotImplemented`` for the others."""
    if isinstance(plain := unwrapped(value), FunctionType):
        return {"function": plain.__qualname__}
    if type(value).__module__.startswith("triton.") and type(value).__name__ in ("dtype", "constexpr"):
        name = type(value).__name__
        return {"triton_dtype": str(value.name)} if name == "dtype" else {"constexpr": _encoded(value.value)}
    return NotImplemented


def _described(specialised: tuple[Any, Any], value: Any) -> tuple[Json, Json, Json]:
    type_, hint = specialised
    if type_ == "constexpr":
        return "constexpr", None, _encoded(value)
    return _encoded(type_), _encoded(_texts(hint)), _encoded(_constants(type_, value))


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
            found[name] = _encoded(value)
    return found
