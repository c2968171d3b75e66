"""What goes between two processes: JSON messages in frames over a pipe, tensors as bytes in a file. No pickle."""

from __future__ import annotations

import json
import os
import select
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pytest_fusion.errors import CanaryError
from pytest_fusion.run.bits import as_bytes

_SIZE = struct.Struct(">Q")
_LENGTH = struct.Struct(">I")
_READ = 1 << 20
# The dtypes of results, by name; a name from elsewhere is looked up here and nowhere else.
_DTYPES = {str(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)}


class Gone(Exception):
    """The process at the other end is gone, or gave no answer in time (``late``)."""

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


def send(fd: int, message: Mapping[str, Any]) -> None:
    """Write one message. Raises ``Gone``."""
    data = json.dumps(message).encode()
    view = memoryview(_SIZE.pack(len(data)) + data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BrokenPipeError:
        raise Gone("its pipe is closed") from None


def receive(fd: int, seconds: float | None = None) -> dict[str, Any]:
    """Read one message, waiting ``seconds`` or for ever. Raises ``Gone`` at the end of the pipe or of the time."""
    end = None if seconds is None else time.monotonic() + seconds
    (size,) = _SIZE.unpack(_exactly(fd, _SIZE.size, end))
    found = json.loads(_exactly(fd, size, end))
    assert isinstance(found, dict)
    return found


def _exactly(fd: int, size: int, end: float | None) -> bytes:
    data = bytearray()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while len(data) < size:
        left = None if end is None else max(0.0, end - time.monotonic())
        if not poll.poll(None if left is None else int(left * 1000) + 1):
            raise Gone("it gave no answer in time", late=True)
        part = os.read(fd, min(_READ, size - len(data)))
        if not part:
            raise Gone("its pipe is closed")
        data += part
    return bytes(data)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements in order, as they are in memory."""
    return as_bytes(tensor.cpu()).numpy().tobytes()


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Names, dtypes and shapes as JSON, then the elements of each tensor in order. Raises ``OSError``."""
    parts, head = [], []
    for name, tensor in tensors.items():
        data = bytes_of(tensor)
        head.append([name, str(tensor.dtype), list(tensor.shape), len(data)])
        parts.append(data)
    text = json.dumps(head).encode()
    path.write_bytes(b"".join([_LENGTH.pack(len(text)), text, *parts]))


def read_tensors(path: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """What :func:`write_tensors` wrote. Raises ``CanaryError`` for a file that is none."""
    try:
        data = path.read_bytes()
        (length,) = _LENGTH.unpack_from(data)
        head = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        at, found = _LENGTH.size + length, {}
        for name, dtype, shape, size in head:
            flat = torch.frombuffer(bytearray(data[at : at + size]), dtype=torch.uint8) if size else torch.empty(0)
            found[str(name)] = (
                (flat.view(_DTYPES[dtype]) if size else flat.to(_DTYPES[dtype])).reshape(shape).to(device)
            )
            at += size
    except (OSError, ValueError, KeyError, TypeError, struct.error, RuntimeError) as error:
        raise CanaryError(f"the results in {path} cannot be read ({type(error).__name__}: {error})") from None
    return found
