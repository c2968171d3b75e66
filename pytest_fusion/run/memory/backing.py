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
# float32, and each further page costs 3 us to map. On a GPU 64 KiB take no longer than 4: the launch dominates.
CPU_GUARD_BYTES = 4 * 1024
DEVICE_GUARD_BYTES = 64 * 1024

# Wider than any kernel's vector accesses and than the 16 bytes of Triton's specialisation.
ALIGNMENT = 256

# Untouched address space behind the guards: a tile of 64 rows of 4,096 float32 that starts past the last row ends in
# it, not in the heap. It costs no memory until written, and 4 us to check.
SLACK_BYTES = 1024 * 1024

# Under "always", the kernel would back such a mapping by zeroed 2 MiB pages: 100 us for a tensor of ten elements.
_NO_HUGE_PAGES_BELOW = 8 * 1024 * 1024

# From here on mappings reserve no memory: such a tensor is mostly gap, and a 2 MiB page for each element would take
# real memory. Python names the flag from 3.13 on.
_UNRESERVED_FROM = 1024 * 1024 * 1024
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0)


class Backing:
    """``size`` writable bytes, aligned to ``ALIGNMENT``; raises ``MemoryError`` (or torch's) without enough memory."""

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
        """Whether bytes ``start`` to ``stop`` repeat ``bits``: 0.5 us a guard, torch 12; ``None`` off the CPU."""
        if self._mapping is None:
            return None
        return self._mapping[SLACK_BYTES + start : SLACK_BYTES + stop] == _repeated(bits, stop - start)

    def strays(self) -> Iterator[tuple[int, int]]:
        """Start and end of written pages of the slack, in bytes from the start of ``memory``. It reads resident
        (touched) pages only. Empty without ``mincore`` and off the CPU; misses written zeros."""
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
        """Zero writes into the slack, so that the next check reports only new ones."""
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
        with contextlib.suppress(OSError):  # kernels without huge pages reject the advice, and do not need it
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return mapping


@lru_cache(maxsize=256)
def _repeated(bits: bytes, size: int) -> bytes:
    return bits * (size // len(bits))


@cache
def _mincore() -> Callable[[int], bytes] | None:
    """A function from an address to the residency of the slack's pages: a byte each, 1 or 0; empty on an error."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.PyDLL(None).mincore  # PyDLL: releasing the interpreter lock takes longer than the call
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    function.restype = ctypes.c_int
    vector = ctypes.c_char * (SLACK_BYTES // mmap.PAGESIZE)

    def mincore(address: int) -> bytes:
        flags = vector()
        return flags.raw if function(address, SLACK_BYTES, flags) == 0 else b""

    return mincore
