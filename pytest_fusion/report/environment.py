"""Versions and device of a run, found without importing a package and without starting CUDA."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Distributions, under their keys in reports.
_PACKAGES = ("pytest_fusion", "pytest", "torch", "triton", "numpy", "ml_dtypes", "hypothesis")
_DRIVER = Path("/proc/driver/nvidia")


def describe(device: str = "cpu", **more: Any) -> dict[str, Any]:
    """The ``environment`` of every report, for ``"cpu"``, ``"cuda"`` or ``"cuda:N"``. ``more`` (profile, seed)
    overrides: under pytest-xdist only a worker knows its device's name. A package that is not installed is ``None``."""
    on_cuda = device.startswith("cuda")
    found: dict[str, Any] = {
        "lane": "cuda" if on_cuda else "cpu-interpreter",
        "device": device,
        "device_name": _cuda_name(device) if on_cuda else cpu_name(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{package: _version(package) for package in _PACKAGES},
    }
    if on_cuda:
        found["driver"] = driver_version()
        # torch may be a shell: another plugin may have put anything under that name.
        found["cuda"] = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return found | more


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the kernel states it, else its architecture."""
    return _after(_lines(cpuinfo), "model name") or platform.processor() or platform.machine()


def nvidia_name(driver: Path = _DRIVER) -> str | None:
    """Names of the GPUs that the driver lists, joined; the driver's order is not CUDA's, so there is no index."""
    names = {_after(_lines(file), "Model") for file in driver.glob("gpus/*/information")}
    return " / ".join(sorted(filter(None, names))) or None


def driver_version(driver: Path = _DRIVER) -> str | None:
    """The NVIDIA kernel driver's version, ``"580.65.06"``."""
    words = "".join(_lines(driver / "version")[:1]).split()
    return next((word for word in words if word[0].isdigit() and word.count(".") >= 1), None)


def _cuda_name(device: str) -> str | None:
    """From torch if this process already runs CUDA; else from the driver, because torch would start CUDA."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return str(cuda.get_device_name(device))
    return nvidia_name()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(file: Path) -> list[str]:
    """The lines of a file; none if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _after(lines: Iterable[str], key: str) -> str | None:
    for line in lines:
        name, colon, value = line.partition(":")
        if colon and name.strip() == key:
            return value.strip()
    return None
