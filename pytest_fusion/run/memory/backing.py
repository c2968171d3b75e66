"""The raw memory behind a guarded region: one private mapping on the CPU, one allocation elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import sys
from collections.abc import Callable, Iterator
from functools import cache, lru_cache

import torch

# One page on the CPU: an overrun damages its first bytes whatever its length, a read past the end meets 1,024 poisoned
# float32, and each further page costs 3 us to map in. On a GPU 64 KiB take no longer than 4: the launch is the price.
CPU_GUARD_BYTES = 4 * 1024
DEVICE_GUARD_BYTES = 64 * 1024

# Wider than the vector accesses of any kernel and than what Triton specialises on (16 bytes).
ALIGNMENT = 256

# Behind the guards lies untouched address space: a tile of 64 rows of 4,096 float32 that starts past the last row ends
# in it instead of in the heap. It costs no memory until something writes there, and 4 us to ask whether something did.
SLACK_BYTES = 1024 * 1024

# Under "always", the kernel would back such a mapping by zeroed 2 MiB pages: 100 us for a tensor of ten elements.
_NO_HUGE_PAGES_BELOW = 8 * 1024 * 1024

# From here on address space is asked for without a promise of memory behind it: what is that large is mostly gap, and
# one page of 2 MiB for each of its elements would be memory after all. Python names the flag from 3.13 on.
_UNRESERVED_FROM = 1024 * 1024 * 1024
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0)


class Backing:
    """``size`` writable bytes as the uint8 tensor ``memory``, its address a multiple of ``ALIGNMENT``.

    Raises ``MemoryError`` (or torch's ``OutOfMemoryError``) when there is not enough.
    """

    __slots__ = ("_mapping", "_pages", "_slack", "memory")

    def __init__(self, size: int, device: torch.device) -> None:
        self._mapping: mmap.mmap | None = None
        if device.type != "cpu":
            self.memory = torch.empty(size, dtype=torch.uint8, device=device)
            return
        body = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self._mapping = _map(SLACK_BYTES + body + SLACK_BYTES)
        except (OSError, ValueError) as error:
            raise MemoryError(f"no memory for a guarded region of {size} bytes: {error}") from error
        self._slack = (range(SLACK_BYTES), range(SLACK_BYTES + body, SLACK_BYTES + body + SLACK_BYTES))
        self.memory = torch.frombuffer(self._mapping, dtype=torch.uint8, offset=SLACK_BYTES, count=size)
        self._pages = self.memory.data_ptr() - SLACK_BYTES

    def holds(self, start: int, stop: int, bits: bytes) -> bool | None:
        """Whether bytes ``start`` to ``stop`` repeat ``bits``; ``None`` off the CPU, where reading would synchronise.

        The plain comparison of bytes takes 0.5 us for a guard, the same by torch operations 12.
        """
        if self._mapping is None:
            return None
        return self._mapping[SLACK_BYTES + start : SLACK_BYTES + stop] == _repeated(bits, stop - start)

    def strays(self) -> Iterator[tuple[int, int]]:
        """Written pages of the slack: where the writing begins and ends, in bytes from the start of ``memory``.

        A page never touched is not resident, so only touched ones are read. Where the system cannot tell (no
        ``mincore``), and off the CPU, there is nothing to report. Zeros written there are not seen.
        """
        mapping, mincore = self._mapping, _mincore()
        if mapping is None or mincore is None:
            return
        page = mmap.PAGESIZE
        for slack in self._slack:
            flags, at = mincore(self._pages + slack.start), 0
            while (at := flags.find(1, at)) >= 0:
                start = slack.start + at * page
                content = mapping[start : start + page]
                tail = content.lstrip(b"\0")
                if tail:
                    first = start + page - len(tail)
                    yield first - SLACK_BYTES, first + len(tail.rstrip(b"\0")) - SLACK_BYTES
                at += 1

    def forget_strays(self) -> None:
        """Zero what was written into the slack, so that the next check reports only what is new."""
        if self._mapping is None:
            return
        for start, stop in list(self.strays()):
            self._mapping[SLACK_BYTES + start : SLACK_BYTES + stop] = bytes(stop - start)


def _map(size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    large = size >= _UNRESERVED_FROM
    unreserved = _NORESERVE if large and sys.platform.startswith("linux") else 0
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved)
    if (large or size < _NO_HUGE_PAGES_BELOW) and hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # kernels built without huge pages refuse the advice, and do not need it
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return mapping


@lru_cache(maxsize=256)
def _repeated(bits: bytes, size: int) -> bytes:
    return bits * (size // len(bits))


@cache
def _mincore() -> Callable[[int], bytes] | None:
    """Which pages of the slack at an address are resident: one byte for each, 1 or 0; empty on an error."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.PyDLL(None).mincore  # PyDLL: giving up the interpreter lock takes longer than the call
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    function.restype = ctypes.c_int
    vector = ctypes.c_char * (SLACK_BYTES // mmap.PAGESIZE)

    def mincore(address: int) -> bytes:
        flags = vector()
        return flags.raw if function(address, SLACK_BYTES, flags) == 0 else b""

    return mincore
