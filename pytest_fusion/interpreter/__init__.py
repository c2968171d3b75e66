"""Triton kernels on the CPU: switches Triton's interpreter on and corrects what it computes wrongly.

Importing it imports neither Triton nor torch. Call ``enable()`` before user modules are imported; the rest happens when
they import Triton. Each module says what it corrects and which hardware behaviour it follows.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pytest_fusion.interpreter.bridge.hook import TOO_EARLY, enable, install
from pytest_fusion.interpreter.bridge.lane_state import installed, notes, problem, version
from pytest_fusion.interpreter.launch import observe

if TYPE_CHECKING:
    from pytest_fusion.interpreter.session import (
        Execution,
        Finding,
        MemoryFinding,
        NotModelledError,
        Session,
        interpreted,
    )

__all__ = [
    "TOO_EARLY",
    "Execution",
    "Finding",
    "MemoryFinding",
    "NotModelledError",
    "Session",
    "enable",
    "install",
    "installed",
    "interpreted",
    "notes",
    "observe",
    "problem",
    "version",
]


def __getattr__(name: str) -> Any:
    """A name of `session`, whose import switches the interpreter on."""
    if name in __all__:
        return getattr(import_module("pytest_fusion.interpreter.session"), name)
    raise AttributeError(f"module 'pytest_fusion.interpreter' has no attribute {name!r}")
