"""A second copy of Triton that compiles interpreted kernels, for a child that ends with it.

A kernel's decorator decides whether it is interpreted, and the CPU lane replaces most of ``triton.language``. A second
import takes 0.2 s and has neither. Its kernels are made again from their functions, so closures and kernels without a
name in a module compile as well.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from pytest_fusion.interpreter.control.fingerprint import names_in

if TYPE_CHECKING:
    from pytest_fusion.run.measure.resources.specialiser import Live

_NEEDED = (
    *("triton.compiler", "triton.compiler.code_generator", "triton.backends.nvidia.compiler"),
    *("triton.tools.tensor_descriptor", "triton.language.extra.cuda", "triton.language.extra.libdevice"),
)
# Compiled code is the same for both copies, and cannot be imported twice.
_SHARED = "triton._C"
_PLAIN = (type(None), bool, int, float, str, bytes, dict, list, set)


def _tritons(name: object) -> bool:
    return isinstance(name, str) and (name == "triton" or name.startswith("triton."))


@cache
def second_triton() -> dict[str, ModuleType]:
    """Triton's modules by name, not interpreting; ``sys.modules`` has the first copy. Raises as their import does."""
    own = {name: module for name, module in sys.modules.items() if _tritons(name)}
    interpret = os.environ.pop("TRITON_INTERPRET", None)
    _forget()
    try:
        for name in _NEEDED:
            importlib.import_module(name)
        return {name: module for name, module in sys.modules.items() if _tritons(name)}
    finally:
        _forget()
        sys.modules.update(own)
        if interpret is not None:
            os.environ["TRITON_INTERPRET"] = interpret


def _forget() -> None:
    for name in [name for name in sys.modules if _tritons(name) and not name.startswith(_SHARED)]:
        del sys.modules[name]


class Compilable:
    """Makes kernels compilable, in a child of the interpreting process: it changes modules for good."""

    def __init__(self) -> None:
        import torch

        from pytest_fusion.interpreter.bridge import modelled_device

        second = second_triton()
        # Users import Triton's objects from these modules: each object's place by its identity.
        self._places = {
            id(value): (module.__name__, name)
            for module in [module for name, module in sys.modules.items() if _tritons(name)]
            for name, value in tuple(vars(module).items())
            if not isinstance(value, _PLAIN)
        }
        self._made: dict[int, Any] = {}
        # A freed object's ``id`` could be another's.
        self._seen: list[Any] = []
        self._searched: set[tuple[int, frozenset[str]]] = set()
        os.environ.pop("TRITON_INTERPRET", None)
        _forget()
        sys.modules.update(second)
        modelled_device.model_driver(torch)

    def of(self, live: Live) -> Live:
        """The same launch, of the kernel that the compiler takes."""
        bound = {name: self._again(value) for name, value in live.bound.items()}
        specialised = [(self._again(kind), hint) for kind, hint in live.specialised]
        options = {name: self._again(value) for name, value in live.options.items()}
        return type(live)(self._again(live.kernel), bound, specialised, options)

    def _again(self, value: Any) -> Any:
        """``value``, or its counterpart in the second copy."""
        if isinstance(value, _PLAIN):
            return value
        if id(value) not in self._made:
            self._seen.append(value)
            self._made[id(value)] = self._of_any(value)
        return self._made[id(value)]

    def _of_any(self, value: Any) -> Any:
        kind, module = type(value), ""
        if isinstance(value, ModuleType):
            return importlib.import_module(value.__name__) if _tritons(value.__name__) else value
        if id(value) in self._places:
            module, name = self._places[id(value)]
            return getattr(importlib.import_module(module), name, value)
        if isinstance(value, tuple):
            items = [self._again(item) for item in value]
            return kind(*items) if hasattr(value, "_fields") else tuple(items)
        if not _tritons(kind.__module__) or kind is getattr(sys.modules.get(kind.__module__), kind.__name__, None):
            return value  # of the second copy, or not of Triton
        match kind.__name__:
            case "InterpretedFunction" | "ConstexprFunction":
                return self._function(value)
            case "dtype":
                return sys.modules["triton.language"].dtype(value.name)
            case "constexpr":
                return sys.modules["triton.language"].constexpr(self._again(value.value))
        return self._again(value.fn) if hasattr(value, "fn") else value

    def _function(self, value: Any) -> Any:
        jit: Any = sys.modules["triton.runtime.jit"]
        function: FunctionType = value.fn
        interpreted = type(value).__name__ == "InterpretedFunction"
        made = jit.JITFunction(function, **value.kwargs) if interpreted else jit.ConstexprFunction(function)
        self._made[id(value)] = made  # it may call itself
        names = frozenset(names_in(function.__code__))
        self._replace(function.__globals__, names)
        for cell in function.__closure__ or ():
            cell.cell_contents = self._again(cell.cell_contents)
            self._search(cell.cell_contents, names)
        return made

    def _replace(self, variables: dict[str, Any], names: frozenset[str]) -> None:
        for name in names & variables.keys():
            variables[name] = self._again(variables[name])
            self._search(variables[name], names)

    def _search(self, owner: Any, names: frozenset[str]) -> None:
        """Replace the attributes with these names in a user's module or class."""
        if (id(owner), names) in self._searched:
            return
        self._searched.add((id(owner), names))
        if isinstance(owner, ModuleType) and not owner.__name__.startswith(("triton", "torch")):
            self._replace(vars(owner), names)
        elif isinstance(owner, type) and not owner.__module__.startswith(("triton", "torch")):
            for name in names & vars(owner).keys():
                setattr(owner, name, self._again(vars(owner)[name]))
