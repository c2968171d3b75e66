"""Answers what modules want to know of the GPU while they are imported, without starting CUDA in this process.

fla, flag_gems, gemlite and bitsandbytes choose tiles by the device's capability and shared memory when they are
imported. That starts CUDA, which rules out a fork: no test had a child of its own, and no kernel was compiled ahead
(swiglu of fla-core on an H200 took more than 75 s). A forked child answers.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pytest_fusion.interpreter.bridge.hook import after_import
from pytest_fusion.run.process.fork import ChildError, Crash, can_fork, run_isolated

_SECONDS = 60.0


def answer_without_cuda() -> None:
    """From the import of torch and Triton on, until CUDA starts in this process, their questions go to a child.

    Touches ``torch.cuda.current_device`` and ``get_device_properties``, which its other questions call, and
    ``get_device_properties`` of Triton's ``CudaUtils`` (3.6.0, 3.7.1 and 3.9.0).
    """
    after_import("torch.cuda", _of_torch)
    after_import("triton.backends.nvidia.driver", _of_triton)


def _of_torch(cuda: Any) -> None:
    owner, started, properties = os.getpid(), cuda.current_device, _answered(cuda.get_device_properties)

    @functools.wraps(started)
    def current_device() -> int:
        # Another one can only be set by starting CUDA.
        return 0 if _may_fork(owner) else int(started())

    @functools.wraps(cuda.get_device_properties)
    def get_device_properties(device: Any = None) -> Any:
        if device is None:
            device = cuda.current_device()
        elif not isinstance(device, int):
            device = sys.modules["torch"].device(device).index or 0
        return properties(device)

    cuda.current_device, cuda.get_device_properties = current_device, get_device_properties


def _of_triton(driver: Any) -> None:
    utils = driver.CudaUtils
    begin = utils.__init__

    def begin_answered(self: Any) -> None:
        begin(self)
        properties = self.get_device_properties

        def after_start(device: int) -> Any:
            # The driver does not start CUDA, and where NVML has counted the devices (`device_choice`) nothing else did.
            sys.modules["torch"].cuda.init()
            return properties(device)

        self.get_device_properties = _answered(after_start)

    utils.__init__ = begin_answered


def _may_fork(owner: int) -> bool:
    """Whether this process, the one that imports, could still fork a child for CUDA."""
    return os.getpid() == owner and can_fork() is None


def _answered(function: Callable[[int], Any]) -> Callable[[int], Any]:
    """``function`` of a device, called in a child as long as there may be one; the same answer once known."""
    owner = os.getpid()

    @functools.cache
    def in_child(device: int) -> Any:
        return run_isolated(lambda _: _plain(function(device)), time_limit_s=_SECONDS, forward=False)

    def answered(device: int) -> Any:
        if _may_fork(owner):
            answer = in_child(device)
            if not isinstance(answer, Crash | ChildError):
                return answer
        return function(device)

    return answered


def _plain(value: Any) -> Any:
    """The value; what torch has of a device, which does not pickle, as an object of numbers and strings."""
    if isinstance(value, dict):
        return value
    found = {name: getattr(value, name) for name in dir(value) if not name.startswith("_")}
    return SimpleNamespace(**{name: one if isinstance(one, int | float) else str(one) for name, one in found.items()})
