"""Calls with room for the frames below them, so that none of these costs a mapping of memory.

Python 3.11 and later keep frames in chunks of 16 KiB, each mapped when a call needs it and unmapped when that call
returns. Where the depth at which most calls are made lies at a chunk's end, each of them maps and unmaps one: 290,000
times in a test of an interpreted kernel below pytest, a third of its seconds. The chunk is as large as its first frame
needs, rounded up to a power of two, and what is left of that is for the frames below.
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


def with_room(function: Callable[[], T]) -> T:
    """``function()``."""
    return cast("Callable[[Any], T]", _spacious)(function)
