"""Kinds of rejections, as names in records and counts: why a case was not judged."""

from __future__ import annotations

from typing import Final

# Sizes that allow no tensors.
IMPOSSIBLE: Final = "impossible"
# The kernel needs something that the CPU lane does not model.
NOT_MODELLED: Final = "not-modelled"
# More programs, or longer calls of kernel or reference, than a case may cost.
TOO_EXPENSIVE: Final = "too-expensive"
# In the kernel.
OUT_OF_MEMORY: Final = "out-of-memory"
# For the inputs, the reference, or its float64 lanes (two dozen after a suspected failure).
NO_ROOM_TO_JUDGE: Final = "no-room-to-judge"
# Kernels were compiled and not run.
DRY_RUN: Final = "dry run"
