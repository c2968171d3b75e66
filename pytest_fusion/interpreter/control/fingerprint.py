"""Fingerprints of launches: equal if their programs do the same as long as they load the same values.

They cover numbers, strings, dtypes, ``tl.constexpr``, tuples of these, and Triton's functions with all that they read.
A kernel that can reach anything else (a list, an object, a plain Python function, ``print``) has none.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from pytest_fusion.interpreter.control import tape
from pytest_fusion.interpreter.control.rewrite import RUNTIME
from pytest_fusion.interpreter.memory.regions import Region, Regions, View

# Modules whose classes and functions are deterministic.
_PURE = frozenset({"builtins", "functools", "math", "operator"})
_NUMBERS = frozenset({bool, int, str, type(None)})
# Python's own functions that have an effect or are not deterministic.
_IMPURE = frozenset(
    "__import__ breakpoint compile delattr dir eval exec getattr globals hasattr id input iter locals next open print "
    "setattr vars".split()
)


class _Unknown(Exception):
    """A kernel reads something that a fingerprint does not cover."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """``key`` identifies equal launches, and by address the functions ``held``; ``views``: this launch's tensors."""

    key: Hashable
    views: tuple[View, ...]
    held: tuple[object, ...]


def fingerprint(kernel: Any, arguments: Mapping[str, Any], regions: Regions, how: Hashable) -> Fingerprint | None:
    """The fingerprint of a launch of ``kernel`` in the mode ``how``; ``None`` if it reads anything not covered."""
    if not isinstance(kernel, FunctionType):
        return None
    reader = _Reader()
    try:
        given = tuple(map(reader.argument, arguments.values()))
        reader.meet(kernel)
        read = tuple(reader.read())
    except _Unknown:
        return None
    places = tuple(_place(region) for region in regions)
    views = tuple(view for region in regions for view in region.views)
    return Fingerprint((given, read, places, how), views, tuple(reader.functions))


@dataclass(slots=True)
class _Reader:
    """Turns values into hashable keys, and collects the functions that are reached with all that they read."""

    functions: list[FunctionType] = field(default_factory=list)

    def meet(self, function: FunctionType) -> int:
        if function not in self.functions:
            self.functions.append(function)
        return id(function)

    def read(self) -> Iterator[Hashable]:
        """Keys of everything that the functions read, including functions found on the way."""
        for function in self.functions:
            yield id(function), *self._read_by(function)

    def _read_by(self, function: FunctionType) -> Iterator[Hashable]:
        names = names_in(function.__code__)
        for name in names:
            if name in function.__globals__:
                if name != RUNTIME:
                    yield name, self._constant(function.__globals__[name], names)
            elif name in _IMPURE and hasattr(builtins, name):
                raise _Unknown
        for cell in function.__closure__ or ():
            yield self._constant(_content(cell), names)

    def argument(self, value: Any) -> Hashable:
        """The key of an argument of a launch."""
        if issubclass(type(value), tuple):
            return type(value), *map(self.argument, tuple.__iter__(value))
        if not issubclass(type(value), _language().tensor):
            return self._constant(value, ())
        handle = value.handle
        if not isinstance(data := getattr(handle, "data", None), np.ndarray):
            raise _Unknown
        # The address of a tensor is covered by its region.
        at = "" if "origin" in handle.attr else data.tobytes()
        return str(value.dtype), at, "to" in vars(value)

    def _constant(self, value: Any, names: Iterable[str]) -> Hashable:
        """The key of a value that a program may read; of a module, the attributes with one of these names."""
        # By type alone: attributes of a value may be anything, or raise.
        kind = type(value)
        if kind in _NUMBERS:
            return kind, value
        if kind is float:
            return kind, value.hex()
        if issubclass(kind, tuple):
            return kind, *(self._constant(one, names) for one in tuple.__iter__(value))
        language = _language()
        if kind is language.constexpr:
            return kind, self._constant(value.value, names)
        if issubclass(kind, language.dtype):
            return kind, str(value)
        if kind is sys.modules["triton.runtime.interpreter"].InterpretedFunction:
            return self.meet(value.fn) if not _by_triton(value.fn) else id(value.fn)
        if kind is ModuleType:
            return self._module(value, names)
        if issubclass(kind, FunctionType | type) and _by_triton(value):
            return id(value)
        if (kind is type or kind is BuiltinFunctionType) and value.__module__ in _PURE:
            return id(value)
        raise _Unknown

    def _module(self, module: ModuleType, names: Iterable[str]) -> Hashable:
        held = vars(module)
        if _by_triton(module):
            return id(module)
        if "__getattr__" in held:
            raise _Unknown
        return id(module), *((name, self._constant(held[name], names)) for name in names if name in held)


def _by_triton(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return isinstance(name, str) and name.partition(".")[0] == "triton"


def _language() -> Any:
    return sys.modules["triton.language"]


def _place(region: Region) -> Hashable:
    views = tuple((v.name, v.start, v.shape, v.strides, v.itemsize, v.dtype) for v in region.views)
    return region.nbytes, region.address % tape.ALIGNMENT, views


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # no value yet
        return None


@lru_cache(maxsize=1024)
def names_in(code: CodeType) -> tuple[str, ...]:
    """Names that the code may look up, globals and attributes, in a fixed order."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return tuple(sorted(set(code.co_names).union(*map(names_in, inner))))
