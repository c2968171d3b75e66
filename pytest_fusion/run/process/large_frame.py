"""A fast path: calls a function in a frame so large that no call below it maps memory.

Python 3.11 and later hold frames in chunks of 16 KiB, mapped and unmapped as calls need them. If most calls are at a
chunk's end, each maps and unmaps one: 290,000 times in a test of an interpreted kernel below pytest, a third of its
time. A chunk has its first frame's size, rounded up to a power of two, and the rest serves the frames below.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

T = TypeVar("T")

# Just over half a MiB, so that nearly another half is left: some thousand frames. It stays untouched.
_SLOTS = (1 << 16) + (1 << 10)


def _call(function: Callable[[], T]) -> T:
    return function()


_spacious = FunctionType(_call.__code__.replace(co_stacksize=_SLOTS), globals())


def call_in_large_frame(function: Callable[[], T]) -> T:
    """Call ``function`` with room for some thousand frames of nested calls."""
    return cast("Callable[[Any], T]", _spacious)(function)
