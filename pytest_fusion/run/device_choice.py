"""The device of a run: CUDA if there is a GPU, else Triton's interpreter on the CPU. Does not start CUDA."""

from __future__ import annotations

import ctypes
import itertools
import os
from functools import cache
from typing import Any

from pytest_fusion import interpreter
from pytest_fusion.errors import FusionError


def _nvml() -> Any:
    """The driver's management library, initialised; ``None`` if there is none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        return nvml if nvml.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def _visible() -> list[str] | None:
    """The entries of ``CUDA_VISIBLE_DEVICES`` before the first invalid one; ``None`` if it is not set."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return None
    entries = [entry.strip() for entry in listed.split(",")]
    return list(itertools.takewhile(lambda entry: entry not in ("", "-1"), entries))


@cache
def cuda_devices() -> int:
    """The number of CUDA devices that this process may use, from the driver's management library."""
    visible, nvml, count = _visible(), _nvml(), ctypes.c_uint()
    if visible == [] or nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return 0
    return count.value if visible is None else min(count.value, len(visible))


def capability(device: str) -> tuple[int, int] | None:
    """The compute capability of ``"cuda:N"`` from the driver; ``None`` if unknown."""
    visible, nvml, handle = _visible(), _nvml(), ctypes.c_void_p()
    index = device.partition(":")[2] or "0"
    entry = index if visible is None else visible[int(index)] if int(index) < len(visible) else ""
    if nvml is None:
        return None
    if entry.isdigit():
        missing = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(entry)), ctypes.byref(handle))
    else:
        missing = nvml.nvmlDeviceGetHandleByUUID(entry.encode(), ctypes.byref(handle))
    major, minor = ctypes.c_int(), ctypes.c_int()
    if missing or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)):
        return None
    return major.value, minor.value


def take_own(wanted: str, worker: str) -> None:
    """Put an own GPU first for pytest-xdist worker ``gw0``, ...; the others stay visible: a check uses a second one."""
    count = cuda_devices()
    if wanted not in ("auto", "cuda") or not worker.startswith("gw") or count < 2:
        return
    entries = (_visible() or list(map(str, range(count))))[:count]
    turn = int(worker.removeprefix("gw")) % count
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(entries[turn:] + entries[:turn])


def checked(wanted: str) -> str:
    """``wanted`` itself; raises ``FusionError`` unless it is ``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    head, colon, index = wanted.partition(":")
    if head not in ("auto", "cpu", "cuda") or (colon and not (head == "cuda" and index.isdecimal())):
        raise FusionError(
            f"--fusion-device {wanted!r}: expected auto, cpu, cuda or cuda:N, as in --fusion-device cuda:1"
        )
    return wanted


def choose(wanted: str) -> str:
    """``"cpu"`` or ``"cuda:N"``. Raises ``FusionError`` for an invalid name and for a device that is not there."""
    if checked(wanted) == "cpu":
        return "cpu"
    count = cuda_devices()
    if wanted == "auto":
        return "cuda:0" if count else "cpu"
    index = int(wanted.partition(":")[2] or 0)
    if index >= count:
        raise FusionError(
            f"--fusion-device {wanted}: this machine shows {count} CUDA device(s); use --fusion-device cpu for the "
            "interpreter lane"
        )
    return f"cuda:{index}"


def prepare(device: str) -> None:
    """Set up the process before user modules import Triton."""
    if device == "cpu":
        interpreter.enable()
    else:
        # Otherwise torch.cuda.is_available() starts the driver, after which a fork cannot use CUDA.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        from pytest_fusion.run.device_facts import answer_without_cuda  # only where there is a GPU

        answer_without_cuda()
