"""Tensors bit for bit as they were, in guarded memory, and what a result is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

GUARD_BYTES = 4096


@dataclasses.dataclass
class Placed:
    """A tensor's memory: the whole buffer, its bytes before the call, and which of them are the tensor's own."""

    name: str
    buffer: torch.Tensor
    before: torch.Tensor
    own: torch.Tensor


class Maker:
    """Makes the tensors of one call; ``fill`` (0 or 1) chooses what lies around and between their elements."""

    def __init__(self, device: str, fill: int) -> None:
        self.device, self.fill = device, fill
        self.placed: list[Placed] = []

    def __call__(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int],
        *,
        offset: int,
        storage: int,
        around: str,
        bits: str = "",
        values: Callable[[str], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """A tensor in a storage of ``storage`` elements, guarded by 4 KiB on both sides.

        ``bits`` are its elements in hexadecimal, ``around`` what surrounds them under the two fills; strides and offset
        are in elements. An axis of stride 0 is written once.
        """
        kind = getattr(torch, dtype)
        size = kind.itemsize
        body = storage * size
        guard = _elements(around.split()[self.fill], kind, self.device).view(torch.uint8)
        count = -(-(2 * GUARD_BYTES + body) // len(guard))
        buffer = guard.repeat(count)[: 2 * GUARD_BYTES + body].clone()
        # Through DLPack, the storage is exactly these bytes: nothing tells the kernel of the guards.
        inner = from_dlpack(buffer[GUARD_BYTES : GUARD_BYTES + body]).untyped_storage() if body else None
        made = torch.empty(0, dtype=kind, device=self.device)
        made.set_(made.untyped_storage() if inner is None else inner, offset if body else 0, shape, strides)
        once = [1 if stride == 0 and n > 1 else n for n, stride in zip(shape, strides, strict=True)]
        own = torch.zeros_like(buffer, dtype=torch.bool)
        if made.numel():
            start = GUARD_BYTES + offset * size
            own.as_strided([*once, size], [*(s * size for s in strides), 1], start).fill_(True)
            given = values(self.device) if values is not None else _elements(bits, kind, self.device)
            made.as_strided(once, list(strides), offset).copy_(given.reshape(once))
        self.placed.append(Placed(name, buffer, buffer.clone(), own))
        return made


def _elements(bits: str, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Elements written as hexadecimal numbers, most significant digit first."""
    data = b"".join(bytes.fromhex(word)[::-1] for word in bits.split())
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device).view(dtype)


def leaves(value: Any, path: str = "out") -> dict[str, torch.Tensor]:
    """The tensors of a result by where they stand in it."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f"{path}.{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        items = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    else:
        items = [(f"{path}[{i}]", item) for i, item in enumerate(value)] if isinstance(value, tuple | list) else []
    return {name: tensor for inner, item in items for name, tensor in leaves(item, inner).items()}


def in_place(given: Mapping[str, Any], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The tensors of inputs that are written, by name: ``x (in place)``, or ``x[0] (in place)`` in a list."""
    found: dict[str, torch.Tensor] = {}
    for name in names:
        inner = leaves(given[name], "")
        found |= {f"{name}{f'[{i}]' if at else ''} (in place)": t for i, (at, t) in enumerate(inner.items())}
    return found


def copied(value: Any) -> Any:
    """The same with contiguous copies of all tensors in it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [copied(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: copied(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit, NaN and the sign of zero too."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(t: torch.Tensor) -> torch.Tensor:
    whole = t.detach().resolve_conj().resolve_neg().contiguous()
    # Along a size of 1 what is contiguous may have any stride, and view(torch.uint8) refuses such a tensor.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
