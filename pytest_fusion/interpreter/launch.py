"""The facts about one launch before it runs, as plain data, and the observers of launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from pytest_fusion.case.layouts import FAR
from pytest_fusion.interpreter.scoped import listed

Constexpr = int | bool | str | float

# A smaller launch constant is a flag or a count of warps, not a block size.
_SMALLEST_BLOCK = 8
_LARGEST_BLOCK = 8192
_MOST_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a Triton kernel.

    ``grid`` is padded with ones to three dimensions. ``constexprs``: compile-time arguments, those of the autotune
    config included; a dtype or a function is given by its name. ``source``: ``"path/file.py:line"`` of the definition.
    ``far``: elements of an argument are so far apart that a 32-bit offset wraps.
    """

    kernel: str
    grid: tuple[int, int, int]
    constexprs: dict[str, Constexpr] = field(default_factory=dict)
    source: str = ""
    far: bool = False

    @property
    def programs(self) -> int:
        x, y, z = self.grid
        return x * y * z


_observers: list[Callable[[Launch], None]] = []


def observe(callback: Callable[[Launch], None]) -> AbstractContextManager[object]:
    """Call ``callback`` before each interpreted launch; its exceptions propagate out of the launch."""
    return listed(_observers, callback)


def announce(launch: Launch) -> None:
    """Call every observer with ``launch``, oldest first."""
    for callback in tuple(_observers):
        callback(launch)


def observed() -> bool:
    return bool(_observers)


def likely_blocks(calls: Iterable[Iterable[Launch]]) -> list[int]:
    """The smallest launch constants that could be block sizes and that every one of the calls uses."""
    constants = ({c for launch in call for c in launch.constexprs.values()} for call in calls)
    sizes = ({c for c in found if type(c) is int and _SMALLEST_BLOCK <= c <= _LARGEST_BLOCK} for found in constants)
    return sorted(set.intersection(*sizes))[:_MOST_BLOCKS]


def goes_far(arguments: Iterable[Any]) -> bool:
    """Whether a tensor among the arguments, or that of a descriptor, has offsets of 2^31 elements or more."""
    for value in arguments:
        if isinstance(value, tuple):
            if goes_far(value):
                return True
            continue
        tensor = value.base if hasattr(value, "block_shape") else value
        if not (hasattr(tensor, "stride") and hasattr(tensor, "shape")):
            continue
        if sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) >= FAR:
            return True
    return False
