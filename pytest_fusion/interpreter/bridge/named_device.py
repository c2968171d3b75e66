"""Calls that name a CUDA device on a machine without one: ``torch.empty(n, device="cuda:0")`` is made on the CPU.

Launchers of older packages name the device instead of taking their input's (Unsloth before 2025, many tutorials). Only
where a call was seen to fail for that is anything done: a mode of torch's functions costs each of them 2 us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from pytest_fusion.interpreter.bridge.lane_state import installed
from pytest_fusion.spec.wording import words

T = TypeVar("T")

# What torch says without CUDA: a build for CPUs, no driver, no device that is visible.
_SAID = (
    "Torch not compiled with CUDA enabled",
    "not linked with support for cuda",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "Cannot access accelerator device when none is available",
)
_wanted: list[bool] = []


def missed(error: BaseException) -> bool:
    """Whether ``error`` is torch's answer to a CUDA device that does not exist."""
    text = words(error)
    return torch.cuda.device_count() == 0 and any(said in text for said in _SAID)


def stand_in(error: BaseException) -> bool:
    """From the first such error on, the CPU stands in for devices that are named; true where that is new."""
    if _wanted or not missed(error):
        return False
    _wanted.append(True)
    return True


def with_stand_in(call: Callable[[], T]) -> T:
    """What ``call`` returns; called once more where it names a device that is missing and the CPU now stands in."""
    try:
        return call()
    except Exception as error:
        if not (installed() and stand_in(error)):
            raise
    return call()


def standing_in() -> bool:
    """Whether a call asked for it in this process."""
    return bool(_wanted)


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """While standing in, calls of torch's functions that name a CUDA device get the CPU."""
    if not _wanted:
        yield
        return
    with _OnTheCpu():
        yield


def stay_on_the_cpu() -> None:
    """The same to its end for a thread that makes one call: modes belong to threads."""
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


# A mode is off inside of the functions that it is asked about, and these call the user's Python: the backward of
# xformers' layer norm makes its locks on "cuda", and its gradients were unknown.
_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


@contextmanager
def _throughout_backward() -> Iterator[None]:
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    def run_on_the_cpu(*args: Any, **kwargs: Any) -> Any:
        with _OnTheCpu():
            return run(*args, **kwargs)

    autograd._engine_run_backward = run_on_the_cpu
    try:
        yield
    finally:
        autograd._engine_run_backward = run


def _named(value: Any, *, numbers: bool = False) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return numbers and isinstance(value, int)
