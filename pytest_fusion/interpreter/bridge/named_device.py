"""Calls that name a CUDA device on a machine without one: ``torch.empty(n, device="cuda:0")`` is made on the CPU.

Launchers of older packages (Unsloth before 2025, many tutorials) do not use their input's device. This begins with the
first call that fails for it: a mode of torch's functions costs each of them 2 us.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from pytest_fusion.interpreter.bridge.lane_state import installed
from pytest_fusion.interpreter.scoped import holding
from pytest_fusion.spec.wording import words

T = TypeVar("T")

# Torch's messages without CUDA: a build for CPUs, no driver, no visible device.
_MESSAGES = (
    "Torch not compiled with CUDA enabled",
    "not linked with support for cuda",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "Cannot access accelerator device when none is available",
)
_wanted: list[bool] = []


def missed(error: BaseException) -> bool:
    """Whether torch raised ``error`` because a CUDA device does not exist."""
    text = words(error)
    return torch.cuda.device_count() == 0 and any(message in text for message in _MESSAGES)


def stand_in(error: BaseException) -> bool:
    """Use the CPU for named CUDA devices from the first error of that kind on. True if that begins now."""
    if _wanted or not missed(error):
        return False
    _wanted.append(True)
    return True


def with_stand_in(call: Callable[[], T]) -> T:
    """``call()``, repeated once if it names a missing device that the CPU replaces from now on."""
    try:
        return call()
    except Exception as error:
        if not (installed() and stand_in(error)):
            raise
    return call()


def standing_in() -> bool:
    """Whether a call of this process needed it."""
    return bool(_wanted)


def on_the_cpu() -> AbstractContextManager[object]:
    """While the CPU replaces named devices, torch's functions that name a CUDA device get the CPU."""
    return _OnTheCpu() if _wanted else nullcontext()


def stay_on_the_cpu() -> None:
    """The same for the rest of the current thread: modes belong to threads."""
    if _wanted:
        _OnTheCpu().__enter__()  # type: ignore[no-untyped-call]


class _OnTheCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]  # as on a device, where it is already
        if "device" in kwargs and _named(kwargs["device"], numbers=True):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is torch.Tensor.to:
            args = tuple(torch.device("cpu") if _named(value) else value for value in args)
        if func in _BACKWARDS:
            with _throughout_backward():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


# A mode is off inside the functions that it handles, and these call the user's Python: the backward of xformers' layer
# norm makes its locks on "cuda", and its gradients were unknown.
_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


def _throughout_backward() -> AbstractContextManager[None]:
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    def run_on_the_cpu(*args: Any, **kwargs: Any) -> Any:
        with _OnTheCpu():
            return run(*args, **kwargs)

    return holding(autograd, _engine_run_backward=run_on_the_cpu)


def _named(value: Any, *, numbers: bool = False) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return numbers and isinstance(value, int)
