"""One kernel of a package: its call, the formula that defines it, and the specs made of both."""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import ModuleType
from typing import Any

import torch

from pytest_fusion import FusionSpec

REFERENCES = ("dtype", "float32")


@dataclass(frozen=True, slots=True)
class Kernel:
    """``fused`` is the package's and ``formula`` plain torch, both called with the inputs by keyword.

    ``formula`` in the dtype of its inputs is the first reference. The second gets floating inputs in float32, and its
    results are cast to the dtype that the first input has, but for those at the positions ``wide``. ``keywords`` are
    those of ``FusionSpec``. ``devices`` are those on which the launcher can run. ``proved`` maps the code of a finding
    to the heading in ``docs/findings.md`` under which a script of torch alone shows it.
    """

    name: str
    fused: Callable[..., Any]
    formula: Callable[..., Any]
    inputs: Mapping[str, Any]
    wide: Sequence[int] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    devices: Sequence[str] = ("cpu", "cuda")
    proved: Mapping[str, str] = field(default_factory=dict)

    def spec(self, reference: str) -> FusionSpec:
        """The spec with the reference of that name, one of ``REFERENCES``."""
        formula = self.formula if reference == "dtype" else in_float32(self.formula, self.wide)
        return FusionSpec(
            name=self.name, fused=self.fused, reference=formula, inputs=self.inputs, **dict(self.keywords)
        )


def kernel(
    name: str,
    fused: Callable[..., Any],
    formula: Callable[..., Any],
    inputs: Mapping[str, Any],
    *,
    wide: Sequence[int] = (),
    devices: Sequence[str] = ("cpu", "cuda"),
    proved: Mapping[str, str] | None = None,
    **keywords: Any,
) -> Kernel:
    """A kernel with the keywords of its spec written as in a test."""
    return Kernel(name, fused, formula, inputs, wide, keywords, devices, proved or {})


def in_float32(formula: Callable[..., Any], wide: Sequence[int] = ()) -> Callable[..., Any]:
    """``formula`` on floating inputs cast to float32, its results cast back to the dtype of the first of them.

    What it writes into a cast input is copied back.
    """

    @functools.wraps(formula)
    def upcast(**inputs: Any) -> Any:
        floating = [v.dtype for v in inputs.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
        dtype = floating[0] if floating else torch.float32
        raised = {name: _map(_up, value) for name, value in inputs.items()}
        found = formula(**raised)
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and raised[name] is not value and raised[name]._version:
                value.copy_(raised[name])
        parts = list(found) if isinstance(found, list | tuple) else [found]
        narrow = [part if i in wide else _map(lambda x: _down(x, dtype), part) for i, part in enumerate(parts)]
        return type(found)(narrow) if isinstance(found, list | tuple) else narrow[0]

    return upcast


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_map(function, part) for part in value)
    if isinstance(value, dict):
        return {key: _map(function, part) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: _map(function, getattr(value, f.name)) for f in fields(value)})
    return function(value) if isinstance(value, torch.Tensor) else value


def _up(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _down(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if x.dtype == torch.float32 else x


def without_init(*packages: str) -> None:
    """Makes modules of ``packages`` importable without their ``__init__``, which needs what is not installed."""
    for name in packages:
        if name in sys.modules:
            continue
        parent, _, own = name.rpartition(".")
        path = sys.modules[parent].__path__ if parent else sys.path
        spec = importlib.machinery.PathFinder.find_spec(name, list(path))
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        module = ModuleType(name)
        module.__path__ = list(spec.submodule_search_locations)
        module.__file__ = spec.origin
        sys.modules[name] = module
        if parent:
            setattr(sys.modules[parent], own, module)


def stand_in(name: str, **attributes: Any) -> None:
    """A module with nothing but ``attributes``, for a package that is imported for other parts than a kernel's."""
    parent, _, own = name.rpartition(".")
    if parent and parent not in sys.modules:
        stand_in(parent)
    module = ModuleType(name)
    module.__path__ = []
    for key, value in attributes.items():
        setattr(module, key, value)
    sys.modules[name] = module
    if parent:
        setattr(sys.modules[parent], own, module)
