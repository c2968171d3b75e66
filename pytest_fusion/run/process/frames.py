"""Frames on a pipe: one byte for the kind, a length, and that many bytes."""

from __future__ import annotations

import os
import select
import struct

_HEADER = struct.Struct("<cQ")
_READ_BYTES = 1 << 20


def write_frame(descriptor: int, kind: bytes, payload: bytes) -> None:
    # In one piece: each write wakes the reader, on a core that the work needs.
    rest = memoryview(_HEADER.pack(kind, len(payload)) + payload)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


class FrameReader:
    """Collects what arrives on a pipe and takes frames from it. Makes the descriptor non-blocking."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._data = bytearray()
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def wait(self, seconds: float | None) -> int | None:
        """Read once: the number of bytes, 0 at the end of the pipe, ``None`` if nothing arrived in ``seconds``."""
        # Rounded up: poll takes whole milliseconds, and 0.4 ms would be 0.
        if not self._poll.poll(None if seconds is None else int(seconds * 1000) + 1):
            return None
        part = os.read(self._descriptor, _READ_BYTES)
        self._data += part
        return len(part)

    def next(self) -> tuple[bytes, bytearray] | None:
        """Kind and payload of the next complete frame."""
        if len(self._data) < _HEADER.size:
            return None
        kind, size = _HEADER.unpack_from(self._data)
        end = _HEADER.size + size
        if len(self._data) < end:
            return None
        payload = self._data[_HEADER.size : end]
        del self._data[:end]
        return kind, payload
