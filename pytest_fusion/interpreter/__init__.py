"""Triton kernels on the CPU: switch Triton's interpreter on and mend what it computes wrongly.

Importing this package imports neither Triton nor torch; ``enable()`` is called before user modules are imported and
everything else happens when they import Triton. What is mended, and which hardware behaviour it follows, is told by
the module that does it: ``casts``, ``arith``, ``reductions``, ``libdevice``, ``transfers``, ``atomics``, ``scalars``,
``rewrite``, ``control``, ``autotune``, ``device``. How launches run is told by ``executor`` and ``batch``, which need
not be computed again by ``replay``, what is watched by ``access``, ``tracking``, ``races`` and ``hints``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pytest_fusion.interpreter.bridge.autotune import TunedKernel, autotuned_kernels, force_config
from pytest_fusion.interpreter.bridge.hook import enable, install
from pytest_fusion.interpreter.bridge.lane_state import installed, problem, version
from pytest_fusion.interpreter.bridge.observers import notes, observe

if TYPE_CHECKING:
    from pytest_fusion.interpreter.session import (
        Execution,
        Finding,
        MemoryFinding,
        NotModelledError,
        Session,
        interpreted,
    )

_SESSION = ("Execution", "Finding", "MemoryFinding", "NotModelledError", "Session", "interpreted")

__all__ = [
    "Execution",
    "Finding",
    "MemoryFinding",
    "NotModelledError",
    "Session",
    "TunedKernel",
    "autotuned_kernels",
    "enable",
    "force_config",
    "install",
    "installed",
    "interpreted",
    "notes",
    "observe",
    "problem",
    "version",
]


def __getattr__(name: str) -> Any:
    """The names of `session`, which switches the interpreter on when it is imported."""
    if name in _SESSION:
        return getattr(import_module("pytest_fusion.interpreter.session"), name)
    raise AttributeError(f"module 'pytest_fusion.interpreter' has no attribute {name!r}")
