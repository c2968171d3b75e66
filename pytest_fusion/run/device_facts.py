"""Answers what modules want to know of the GPU while they are imported, without starting CUDA in this process.

fla, flag_gems, gemlite and bitsandbytes choose tiles by the device's capability and shared memory when they are
imported. That starts CUDA, which rules out a fork: no test had a child of its own, and no kernel was compiled ahead
(swiglu of fla-core on an H200: more than 75 s, of which a child would have compiled most). A forked child answers.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from pytest_fusion.interpreter.bridge.hook import after_import
from pytest_fusion.run.process.fork import ChildError, Crash, can_fork, run_isolated

# Functions of torch.cuda that start CUDA; its others call these, and Triton's driver does.
_TORCH = ("current_device", "get_device_properties")
_SECONDS = 60.0


def answer_without_cuda() -> None:
    """From the import of torch and Triton on, until CUDA starts in this process, their questions go to a child.

    Touches ``torch.cuda.current_device`` and ``get_device_properties``, and ``get_device_properties`` of Triton's
    ``CudaUtils`` (3.6.0, 3.7.1 and 3.9.0).
    """
    after_import("torch.cuda", _of_torch)
    after_import("triton.backends.nvidia.driver", _of_triton)


def _of_torch(cuda: ModuleType) -> None:
    for name in _TORCH:
        setattr(cuda, name, _answered(getattr(cuda, name)))


def _of_triton(driver: ModuleType) -> None:
    utils: Any = driver.CudaUtils
    begin = utils.__init__

    def begin_answered(self: Any) -> None:
        begin(self)
        self.get_device_properties = _answered(self.get_device_properties)

    utils.__init__ = begin_answered


def _answered(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, called in a child as long as this process could still fork for CUDA; the same answer once known."""
    owner = os.getpid()

    @functools.cache
    def in_child(*arguments: Any, **named: Any) -> Any:
        work = functools.partial(function, *arguments, **named)
        return run_isolated(lambda _: _plain(work()), time_limit_s=_SECONDS, forward=False)

    @functools.wraps(function)
    def answered(*arguments: Any, **named: Any) -> Any:
        if os.getpid() == owner and can_fork() is None:
            answer = in_child(*arguments, **named)
            if not isinstance(answer, Crash | ChildError):
                return answer
        return function(*arguments, **named)

    return answered


def _plain(value: Any) -> Any:
    """The value; what torch has of a device, which does not pickle, as an object with its numbers and strings."""
    if isinstance(value, int | dict):
        return value
    found = {name: getattr(value, name) for name in dir(value) if not name.startswith("_")}
    return SimpleNamespace(**{name: facts for name, facts in found.items() if isinstance(facts, int | str)})
