"""Which lane a run takes: CUDA where there is a device, else Triton's interpreter on the CPU. Starts no CUDA."""

from __future__ import annotations

import ctypes
import os
from functools import cache

from pytest_fusion.errors import FusionError
from pytest_fusion.run import interpreter


@cache
def cuda_devices() -> int:
    """How many CUDA devices this process may use, asked of the driver's management library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return 0
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return 0
    except (OSError, AttributeError):
        return 0
    return min(count.value, len(visible.split(","))) if visible is not None else count.value


def choose(wanted: str) -> str:
    """``"cpu"`` or ``"cuda:N"`` for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; raises ``FusionError`` for an absent device."""
    if wanted == "cpu":
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
    """Set the process up before user modules import Triton."""
    if device == "cpu":
        interpreter.enable()
    else:
        # torch.cuda.is_available() would otherwise start the driver, after which a fork cannot use CUDA.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
