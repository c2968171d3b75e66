"""Where a kernel died, from the last output of its process: the user's frames, innermost first."""

from __future__ import annotations

import os
import re
from pathlib import Path

# A frame as faulthandler writes it.
_FRAME = re.compile(r'^  File "(?P<file>.*)", line \d+ in .*$', re.MULTILINE)
_OURS = str(Path(__file__).resolve().parents[2]) + os.sep
# From here outwards the stack is this package's and pytest's.
_CALLER = str(Path("run") / "fused.py")
_ORACLE = f"{os.sep}oracle{os.sep}"
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("torch", "triton"))
_MOST_FRAMES = 12
_MOST_LINES = 14


def died_in_reference(stderr_tail: str) -> bool:
    """Whether the reference ran: the oracle calls it, and `run.fused` the kernel."""
    ours = [frame["file"] for frame in _FRAME.finditer(stderr_tail) if frame["file"].startswith(_OURS)]
    callers = [file for file in ours if file.endswith(_CALLER) or _ORACLE in file]
    return bool(callers) and _ORACLE in callers[0]


def last_words(stderr_tail: str) -> str:
    """The fault handler's reason and the user's frames inside the fused call; without a stack, the last lines."""
    frames = list(_FRAME.finditer(stderr_tail))
    if not frames:
        return "\n".join(stderr_tail.rstrip().splitlines()[-_MOST_LINES:])
    inside = []
    for frame in frames:
        if frame["file"].endswith(_CALLER) and frame["file"].startswith(_OURS):
            break
        inside.append(frame)
    own = [frame for frame in inside if not _is_library(frame["file"])]
    reason = stderr_tail.partition("\n")[0]
    return "\n".join([f"{reason} (most recent call first)", *(frame[0] for frame in (own or frames)[:_MOST_FRAMES])])


def _is_library(file: str) -> bool:
    return file.startswith((_OURS, "<frozen ")) or any(part in file for part in _LIBRARIES)
