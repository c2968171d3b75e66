"""Kinds of rejections: why a case was not judged. The names of records and of their counts."""

from __future__ import annotations

from typing import Final

# Sizes of which no tensors can be made.
IMPOSSIBLE: Final = "impossible"
# The kernel asks for what the CPU lane has no model of.
NOT_MODELLED: Final = "not-modelled"
# More programs, or longer calls of kernel or reference, than a case may cost.
TOO_EXPENSIVE: Final = "too-expensive"
# The kernel found none.
OUT_OF_MEMORY: Final = "out-of-memory"
# Its inputs found none, or the reference, or its float64 lanes, of which two dozen are asked about a suspicion.
NO_ROOM_TO_JUDGE: Final = "no-room-to-judge"
# Kernels were compiled and not run.
DRY_RUN: Final = "dry run"
