"""A fast path: calls a function in a frame so large that no call below it maps memory.

Python 3.11 and later keep frames in chunks of 16 KiB, each mapped when a call needs it and unmapped when that call
returns. Where the depth at which most calls are made lies at a chunk's end, each of them maps and unmaps one: 290,000
times in a test of an interpreted kernel below pytest, a third of its seconds. The chunk is as large as its first frame
needs, rounded up to a power of two, and what is left of it serves the frames below: a third of such a test is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

T = TypeVar("T")

# Just over half a MiB, so that nearly another half is left: some thousand frames. None of it is touched before.
_SLOTS = (1 << 16) + (1 << 10)


def _call(function: Callable[[], T]) -> T:
    return function()


_spacious = FunctionType(_call.__code__.replace(co_stacksize=_SLOTS), globals())


def call_in_large_frame(function: Callable[[], T]) -> T:
    """Call ``function`` with room for some thousand frames of nested calls."""
    return cast("Callable[[Any], T]", _spacious)(function)
