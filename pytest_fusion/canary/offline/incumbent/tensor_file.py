"""Tensors as bytes in a file, from a worker to the process that started it. No pickle."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

from pytest_fusion.errors import CanaryError
from pytest_fusion.run.bits import as_bytes

_LENGTH = struct.Struct(">I")
# The dtypes of results, by name; a name from elsewhere is looked up here and nowhere else.
_DTYPES = {str(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)}


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
    """The tensors of a file that :func:`write_tensors` wrote. Raises ``CanaryError`` for any other file."""
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
