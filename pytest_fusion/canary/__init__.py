"""Compares a new kernel with the one in production: ``canary("rms_norm", incumbent=old, candidate=new)``.

``canary.record("rms_norm", old, "recordings")`` records what the kernel is called with there.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fusion.canary.live.policy import Policy
    from pytest_fusion.canary.live.router import Canary, canary
    from pytest_fusion.canary.live.sharing import request
    from pytest_fusion.canary.recording.recorder import Recorder, record

__all__ = ["Canary", "Policy", "Recorder", "canary", "record", "request"]

# Loaded on first use: importing the package must import no torch.
_HOMES = {
    "Canary": "live.router",
    "Policy": "live.policy",
    "Recorder": "recording.recorder",
    "canary": "live.router",
    "record": "recording.recorder",
    "request": "live.sharing",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"pytest_fusion.canary.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pytest_fusion.canary' has no attribute {name!r}")


class _Callable(ModuleType):
    """The folder and the function have one name, so that ``from pytest_fusion import canary`` gives both."""

    def __call__(self, name: str, **options: Any) -> Any:
        return import_module("pytest_fusion.canary.live.router").canary(name, **options)


sys.modules[__name__].__class__ = _Callable
