"""What ``kernel.warmup(...)`` returns where nothing is compiled: enough to size a grid by, and to launch.

Tutorial 02 (fused softmax) and what was made after it ask for registers and shared memory, and launch as many programs
as fit on the device at once, each of which goes on to further rows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pytest_fusion.errors import NotModelledError

# The most that a thread may have (CUDA C++ Programming Guide, "Technical Specifications"): so the fewest programs fit,
# which then have most to do, and loops over further rows are run.
_REGISTERS = 255
_SHARED_BYTES = 1024


class _NotKnownError(NotModelledError, AttributeError):
    """What only a compiled kernel has; who asks whether it is there hears no."""


class Warmed:
    """A kernel as if compiled for the modelled device; ``launch`` is given a grid and positional arguments."""

    def __init__(self, name: str, warps: int, launch: Callable[[Any, tuple[Any, ...]], None]) -> None:
        from pytest_fusion.interpreter.bridge.modelled_device import (
            PROPERTIES,  # with torch, which Triton's import must not bring
        )

        self.name = name
        self.n_regs = min(_REGISTERS, int(PROPERTIES["regs_per_multiprocessor"]) // (32 * warps))
        self.n_spills = 0
        self.n_max_threads = 1024
        self.metadata = SimpleNamespace(name=name, shared=_SHARED_BYTES, num_warps=warps, num_ctas=1)
        self._launch = launch

    def _init_handles(self) -> None:
        """There is no module to load."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, stream=None: self._launch(grid, args)

    def __getattr__(self, name: str) -> Any:
        raise _NotKnownError(
            f"{name!r} of the compiled kernel {self.__dict__.get('name', '')} is asked for, and the CPU lane compiles "
            "nothing. Test this kernel on a GPU (--fusion-device cuda)"
        )
