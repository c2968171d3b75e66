"""What is known about one interpreted launch before it runs, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

Constexpr = int | bool | str | float


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a Triton kernel.

    ``grid`` is padded with ones to three dimensions. ``constexprs`` holds the compile-time arguments, those of the
    chosen autotune config included; what is not a number, a bool or a string (a dtype, a function) is given by its
    name. ``source`` is ``"path/file.py:line"`` of the kernel's definition.
    """

    kernel: str
    grid: tuple[int, int, int]
    constexprs: dict[str, Constexpr] = field(default_factory=dict)
    source: str = ""

    @property
    def programs(self) -> int:
        """How many programs the launch runs."""
        x, y, z = self.grid
        return x * y * z
