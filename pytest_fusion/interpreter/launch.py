"""What is known about one launch before it runs, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pytest_fusion.case.layouts import FAR

Constexpr = int | bool | str | float

# A launch constant below this is a flag or a count of warps, not a block size.
_SMALLEST_BLOCK = 8
_LARGEST_BLOCK = 8192
_MOST_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a Triton kernel.

    ``grid`` is padded with ones to three dimensions. ``constexprs`` holds the compile-time arguments, those of the
    chosen autotune config included; what is not a number, a bool or a string (a dtype, a function) is given by its
    name. ``source`` is ``"path/file.py:line"`` of the kernel's definition. ``far``: elements of an argument lie so far
    apart that an offset in 32 bits wraps around.
    """

    kernel: str
    grid: tuple[int, int, int]
    constexprs: dict[str, Constexpr] = field(default_factory=dict)
    source: str = ""
    far: bool = False

    @property
    def programs(self) -> int:
        """How many programs the launch runs."""
        x, y, z = self.grid
        return x * y * z


def likely_blocks(calls: Iterable[Iterable[Launch]]) -> list[int]:
    """The smallest launch constants of a size that blocks have, of those that each of one or more calls uses."""
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
