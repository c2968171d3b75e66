"""What a spec needs to be run at all: a device, a compute capability, a package."""

from __future__ import annotations

import importlib.util
from typing import Any

from pytest_fusion.errors import SpecError


def _listed(requires: Any) -> list[Any]:
    if isinstance(requires, str):
        return [requires]
    if isinstance(requires, tuple) and len(requires) == 2 and all(isinstance(part, int) for part in requires):
        return [requires]
    return list(requires)


def missing(requires: Any, device: str) -> str | None:
    """Why a spec cannot run on ``device``, or ``None``. Raises ``SpecError`` for a requirement that is none."""
    for need in _listed(requires):
        if need == "cuda":
            if not device.startswith("cuda"):
                return "it requires a CUDA device"
        elif isinstance(need, tuple) and len(need) == 2:
            if not device.startswith("cuda"):
                return f"it requires compute capability {need[0]}.{need[1]}, and this lane is the CPU's"
            found = _capability(device)
            if found is not None and found < need:
                return f"it requires compute capability {need[0]}.{need[1]}, {device} has {found[0]}.{found[1]}"
        elif isinstance(need, str) and all(part.isidentifier() for part in need.split(".")):
            if importlib.util.find_spec(need.partition(".")[0]) is None:
                return f"it requires the package {need!r}, which is not installed"
        else:
            raise SpecError(
                f"requires={need!r}; expected 'cuda', a compute capability such as (9, 0), or a package's import name"
            )
    return None


def _capability(device: str) -> tuple[int, int] | None:
    """Asked of the driver's library, because asking torch would start CUDA in a process that still has to fork."""
    try:
        import pynvml
    except ImportError:
        return None
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(int(device.partition(":")[2] or 0))
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return int(major), int(minor)
