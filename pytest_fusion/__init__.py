"""pytest-fusion: judge fused GPU kernels against their unfused references."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fusion.canary.entry import canary
    from pytest_fusion.errors import FusionError, FusionFailure, SpecError
    from pytest_fusion.plugin.check import check_equivalent
    from pytest_fusion.plugin.decorator import FusionSpec, fused_equivalent
    from pytest_fusion.spec import values
    from pytest_fusion.spec.dims import dim
    from pytest_fusion.spec.inputs import derived, optional, tensor
    from pytest_fusion.spec.promises import Tolerance
    from pytest_fusion.spec.random_numbers import rng

__version__ = "0.1.0"

__all__ = [
    "FusionError",
    "FusionFailure",
    "FusionSpec",
    "SpecError",
    "Tolerance",
    "canary",
    "check_equivalent",
    "derived",
    "dim",
    "fused_equivalent",
    "optional",
    "rng",
    "tensor",
    "values",
]

# Loaded on first use: importing this package, as every pytest run does, must import neither torch nor Hypothesis.
_HOMES = {
    "FusionError": "errors",
    "FusionFailure": "errors",
    "FusionSpec": "plugin.decorator",
    "SpecError": "errors",
    "Tolerance": "spec.promises",
    "check_equivalent": "plugin.check",
    "derived": "spec.inputs",
    "dim": "spec.dims",
    "fused_equivalent": "plugin.decorator",
    "optional": "spec.inputs",
    "rng": "spec.random_numbers",
    "tensor": "spec.inputs",
}


def __getattr__(name: str) -> Any:
    if name == "canary":
        return import_module("pytest_fusion.canary")
    if name == "values":
        return import_module("pytest_fusion.spec.values")
    if name in _HOMES:
        return getattr(import_module(f"pytest_fusion.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pytest_fusion' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, "canary", "values"])
