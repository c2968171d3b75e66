"""Makes random calls repeatable: a kernel on a seeded generator, and a reference with the kernel's mask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch


class Seeded:
    """A kernel with torch's generator seeded before and restored after its ``calls``; returns the last result."""

    def __init__(self, fused: Callable[..., Any], seed: int, calls: int = 1) -> None:
        functools.update_wrapper(self, fused)
        self.fused, self._seed, self._calls = fused, seed, calls

    def __call__(self, **arguments: Any) -> Any:
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self._seed)
            for _ in range(self._calls - 1):
                self.fused(**arguments)
            return self.fused(**arguments)


class MaskedReference:
    """A reference that gets the kernel's mask for the inputs ``given`` as its parameter ``name``. Raises ``ValueError``
    for inputs of other shapes or values, for which the mask is unknown."""

    def __init__(self, reference: Callable[..., Any], name: str, mask: torch.Tensor, given: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, reference)
        self.reference, self._name, self._mask = reference, name, mask
        self._given = {name: _signature(value) for name, value in given.items()}

    def __call__(self, **arguments: Any) -> Any:
        other = [name for name, value in arguments.items() if _signature(value) != self._given.get(name)]
        if other and set(other) & set(self._given):
            raise ValueError(f"the mask was seen for another {other[0]}")
        return self.reference(**arguments, **{self._name: self._mask.clone()})


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return repr(value) if isinstance(value, bool | int | float | str | None) else None


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The user's own function in a `Seeded` or a `MaskedReference`."""
    while isinstance(function, Seeded | MaskedReference):
        function = function.fused if isinstance(function, Seeded) else function.reference
    return function
