"""Launches of Triton kernels as `Specialisation`s, noted while they happen; interpreted, compiled, or left out.

Of Triton this touches ``InterpretedFunction.run``, ``JITFunction.run``, ``Autotuner.run`` and what `run/configs` lists.
What a launch's own binder answers comes from ``KernelParam`` and ``create_function_from_signature`` of
``triton.runtime.jit`` and from a kernel's ``fn``, ``params`` and ``kwargs``: the same in 3.6.0, 3.7.1 and 3.9.0.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pytest_fusion.interpreter.scoped import replaced
from pytest_fusion.run.autotuned import pruned
from pytest_fusion.run.measure.resources.function_places import NotFoundError, encode, place_of
from pytest_fusion.run.measure.resources.specialisation import Argument, Json, Place, Specialisation

# What Triton specialises on does not depend on the compute capability (only AMD's backend has rules of its own).
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

    signature = inspect.signature(kernel.fn)
    parameters = getattr(kernel, "params", None)
    if parameters is None:  # an interpreted kernel keeps what it was decorated with and nothing else
        never = kernel.kwargs.get("do_not_specialize") or ()
        unaligned = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
        parameters = [
            jit.KernelParam(i, parameter, i in never or name in never, i in unaligned or name in unaligned)
            for i, (name, parameter) in enumerate(signature.parameters.items())
        ]
    return jit.create_function_from_signature(signature, parameters, _backend())


@dataclass(frozen=True, slots=True)
class Live:
    """A kernel of this process and what its binder answered: all that compiling it takes, functions included."""

    kernel: Any
    bound: dict[str, Any]
    specialised: list[tuple[Any, Any]]
    options: dict[str, Any]


def bind(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Live:
    """The arguments of a launch as Triton's own binder sees them.

    Raises ``NotFoundError`` for what Triton refuses to specialise.
    """
    try:
        bound, specialised, options = _binder(kernel)(*args, **kwargs)
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        raise NotFoundError(f"Triton does not specialise these arguments: {error}") from error
    given = {name: value for name, value in options.items() if name not in bound}
    if getattr(kernel, "debug", None) or getattr(kernel, "kwargs", {}).get("debug"):
        given.setdefault("debug", True)
    return Live(kernel, dict(bound), list(specialised), given)


def specialise(live: Live, *, strict: bool = True) -> Specialisation:
    """The compilation that a launch of a kernel (interpreted or compiled) needs, as plain data.

    Raises ``NotFoundError`` for what cannot be described to another process; unless ``strict``, only its name is given.
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
    """Hints without the constants that stand among those of a tuple."""
    if isinstance(hint, tuple):
        items = [_texts(item) for item in hint]
        return type(hint)(*items) if hasattr(hint, "_fields") else tuple(items)
    return hint if isinstance(hint, str) else None


def _constants(type_: Any, value: Any) -> Any:
    """The constants inside of a tuple, ``None`` where there is none."""
    if isinstance(type_, tuple):
        items = [_constants(kind, item) for kind, item in zip(type_, value, strict=True)]
        return type(type_)(*items) if hasattr(type_, "_fields") else tuple(items)
    return value if type_ == "constexpr" else None


def read_globals(function: Any) -> dict[str, Json]:
    """The plain variables of its module that a kernel's own code names: numbers, strings, constexprs."""
    found: dict[str, Json] = {}
    for name in sorted(set(function.__code__.co_names)):
        value = function.__globals__.get(name)
        value = value.value if type(value).__name__ == "constexpr" else value
        if type(value) in _PLAIN:
            found[name] = encode(value)
    return found


@dataclass(frozen=True, slots=True)
class Noted:
    """One launch. ``specialisation`` is ``None`` where it cannot be described, for the ``reason`` given.

    ``others`` are those of the further configs that an autotuner could have chosen: it passes over what does not fit.
    ``live`` holds the kernel itself, ``live_others`` those of ``others``; they stay in this process.
    """

    kernel: str
    specialisation: Specialisation | None
    reason: str = ""
    others: tuple[Specialisation, ...] = ()
    live: Live | None = None
    live_others: tuple[Live, ...] = ()


@dataclass(slots=True)
class _Tuning:
    """The state of an autotuner: the configs that it could choose, launched one by one."""

    asking: bool = False
    found: list[tuple[Specialisation, Live]] = field(default_factory=list)


class _Notes:
    def __init__(self, into: list[Noted], run: bool, strict: bool, then: Callable[[Any, Noted], None] | None) -> None:
        self._into = into
        self._run = run
        self._strict = strict
        self._then = then
        self._tuning: list[_Tuning] = []

    def launched(self, upstream: Any, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In place of a kernel's ``run``."""
        plain = {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}
        asking = bool(self._tuning) and self._tuning[-1].asking
        if kwargs.get("warmup") and not asking:
            return upstream(kernel, *args, **kwargs)
        name = str(kernel.fn.__name__)
        try:
            live = bind(kernel, args, plain)
            found = specialise(live, strict=self._strict)
        except NotFoundError as error:
            noted = Noted(name, None, str(error))
        else:
            if asking:
                self._tuning[-1].found.append((found, live))
            others = [other for other in self._tuning[-1].found if other[0] != found] if self._tuning else []
            noted = Noted(name, found, "", tuple(o for o, _ in others), live, tuple(o for _, o in others))
        if asking:
            return None
        self._into.append(noted)
        result = upstream(kernel, *args, **kwargs) if self._run else None
        if self._then is not None:
            self._then(result, noted)
        return result

    def tuned(self, upstream: Any, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In place of an autotuner's ``run``: every config that its pruning leaves is described first."""
        if len(tuner.configs) < 2 or self._tuning or not hasattr(tuner.fn, "run"):
            return upstream(tuner, *args, **kwargs)
        tuning = _Tuning(asking=True)
        self._tuning.append(tuning)
        try:
            for config in pruned(tuner, args, kwargs):
                # A config's hook sets the blocks of tensor descriptors, so it comes before; what the launch itself
                # chooses calls its own again.
                with contextlib.suppress(Exception):
                    _launch(tuner, config, args, kwargs)
            tuning.asking = False
            return upstream(tuner, *args, **kwargs)
        finally:
            self._tuning.pop()


def _launch(tuner: Any, config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = {**kwargs, **config.all_kwargs()}
    if config.pre_hook is not None:
        names = dict(zip(tuner.arg_names, args, strict=False))
        config.pre_hook({**names, **{n: v for n, v in given.items() if n not in ("grid", "warmup")}})
    tuner.fn.run(*args, **{**given, "warmup": True})


@contextmanager
def noted(
    into: list[Noted],
    *,
    run: bool = True,
    strict: bool = True,
    then: Callable[[Any, Noted], None] | None = None,
) -> Iterator[None]:
    """Note every launch; does nothing where Triton was not imported.

    ``run=False`` leaves the kernels out: what they would write stays as it is. ``strict=False`` describes what no other
    process could find as well, by its name. ``then`` is called after each launch with what it returned, a compiled
    kernel on a GPU.
    """
    notes = _Notes(into, run, strict, then)
    with contextlib.ExitStack() as stack:
        for module, class_, replacement in (
            ("triton.runtime.interpreter", "InterpretedFunction", notes.launched),
            ("triton.runtime.jit", "JITFunction", notes.launched),
            ("triton.runtime.autotuner", "Autotuner", notes.tuned),
        ):
            stack.enter_context(replaced(module, class_, "run", replacement))
        yield
