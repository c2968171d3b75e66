"""Where a row was measured: the class of devices in which facts compare, and the narrower one of latencies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

MODELLED = "cpu (modelled)"
# Latency is compared only where all of these are equal: each part, and its name in messages.
_LATENCY = {
    "gpu": "GPU",
    "cpu": "CPU",
    "capability": "compute capability",
    "mig": "MIG profile",
    "driver": "driver",
    "torch": "torch",
    "triton": "triton",
}


def device_class(environment: Mapping[str, Any]) -> str:
    """``"cpu (modelled)"``, or the GPU's name with its compute capability: ``"NVIDIA H200 (sm_90)"``.

    ``environment`` is that of the reports, with ``capability`` (``"9.0"``) beside ``device_name`` on a GPU. Raises
    ``ValueError`` on a GPU without a name: its facts would be taken for those of any other.
    """
    if environment.get("lane") != "cuda":
        return MODELLED
    name, capability = environment.get("device_name"), environment.get("capability")
    if not name:
        raise ValueError("this GPU has no name, so its facts cannot be distinguished from those of other GPUs")
    return f"{name} (sm_{str(capability).replace('.', '')})" if capability else str(name)


def latency_place(environment: Mapping[str, Any]) -> dict[str, str]:
    """What must be equal for two latencies to be compared; versions of torch and Triton without their last part.

    The driver counts by its first part: ``"580.65.06"`` is ``"580"``. A patch release of a compiler rarely changes what
    it generates, and a GPU's driver is renewed with its machine.
    """
    parts = {
        "cpu" if environment.get("lane") == "cpu-interpreter" else "gpu": environment.get("device_name"),
        "capability": environment.get("capability"),
        "mig": environment.get("mig"),
        "driver": _release(environment.get("driver"), 1),
        "torch": _release(environment.get("torch"), 2),
        "triton": _release(environment.get("triton"), 2),
    }
    return {name: str(value) for name, value in parts.items() if value}


def elsewhere(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """How two places of latency differ, as half a sentence; ``None`` where they do not."""
    other = [
        f"{words} {before.get(name) or 'unknown'} there, {now.get(name) or 'unknown'} here"
        for name, words in _LATENCY.items()
        if before.get(name) != now.get(name)
    ]
    return "; ".join(other) or None


def unit_of(uuid: str | None) -> str:
    """Eight digits that identify a GPU without its real id; empty if that is not known."""
    return hashlib.sha256(uuid.encode()).hexdigest()[:8] if uuid else ""


def renewed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """``"; made with triton 3.6.0, this is 3.7.1"``: versions that may explain another fact, else nothing."""
    parts = [
        f"{name} {before[name]}, this is {now[name]}"
        for name in ("torch", "triton", "cuda", "driver")
        if before.get(name) and now.get(name) and before[name] != now[name]
    ]
    return f"; the baseline was made with {', '.join(parts)}" if parts else ""


def _release(version: Any, parts: int) -> str:
    return ".".join(str(version).partition("+")[0].split(".")[:parts]) if version else ""
