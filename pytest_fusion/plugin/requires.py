"""The requirements of a spec: a device, a compute capability, a package."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from pytest_fusion.errors import SpecError
from pytest_fusion.run import device_choice
from pytest_fusion.spec.wording import is_near


def _listed(requires: Any) -> list[Any]:
    if isinstance(requires, list | tuple | set | frozenset) and not _is_capability(requires):
        return list(requires)
    return [requires]


def check(requires: Any) -> None:
    """Raises ``SpecError`` for an invalid requirement."""
    for need in _listed(requires):
        architecture = isinstance(need, str) and re.fullmatch(r"(?:sm|compute)_?(\d+)(\d)[af]?", need)
        if architecture:
            major, minor = architecture.groups()
            raise SpecError(f"requires={need!r}; a compute capability is written ({major}, {minor})")
        is_module = isinstance(need, str) and all(part.isidentifier() for part in need.split("."))
        if not _is_capability(need) and not is_module:
            raise SpecError(
                f"requires={need!r}; expected 'cuda', a compute capability such as (9, 0), or a package's import name"
            )


def _is_capability(need: Any) -> bool:
    return isinstance(need, tuple) and len(need) == 2 and all(type(part) is int for part in need)


def missing(requires: Any, device: str) -> str | None:
    """Why a spec cannot run on ``device``, or ``None``. Raises ``SpecError`` for an invalid requirement."""
    check(requires)
    for need in _listed(requires):
        if need == "cuda":
            if not device.startswith("cuda"):
                return "it requires a CUDA device"
        elif _is_capability(need):
            if not device.startswith("cuda"):
                return f"it requires compute capability {need[0]}.{need[1]}, and this lane is the CPU's"
            found = device_choice.capability(device)
            if found is not None and found < need:
                return f"it requires compute capability {need[0]}.{need[1]}, {device} has {found[0]}.{found[1]}"
        elif importlib.util.find_spec(need.partition(".")[0]) is None:
            meant = "; did you mean 'cuda'?" if is_near(need, ["cuda"]) else ""
            return f"it requires the package {need!r}, which is not installed{meant}"
    return None
