"""Copies of a call's tensors, for the other kernel or to restore the originals; and the states of random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.canary.live.calls.arguments import Names
from pytest_fusion.case.containers import map_tensors, tensors_of
from pytest_fusion.run.placing import write

# CUDA allocates at multiples of 512 bytes. A copy aligned alike does not make Triton compile again.
_ALIGNED = 512


class CannotCopyError(Exception):
    """The tensors cannot be copied: too large, or without plain strides."""


@dataclass(slots=True)
class Pair:
    """An argument's tensor and its copy, both plain strided views without autograd history."""

    name: str
    original: Tensor
    copy: Tensor


@dataclass(slots=True)
class Copies:
    """``args`` and ``kwargs`` with copies in place of tensors: same shapes, strides, alignment and shared memory."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pairs: list[Pair]

    def restore(self) -> None:
        """Writes the copies back, element by element: memory between elements may belong to another thread by now."""
        for pair in self.pairs:
            write(pair.original, pair.copy)


def copies_of(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    named: Names,
    *,
    only: Collection[str] | None = None,
    most_bytes: float,
) -> Copies:
    """Copies of all tensors, or of those in ``only``; waits for no device. Raises ``CannotCopyError`` first."""
    chosen: dict[int, tuple[str, Tensor]] = {}
    for name, value in named(args, kwargs).items():
        if only is not None and name not in only:
            continue
        for tensor in tensors_of(value):
            if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
                raise CannotCopyError(f"{name} is not a plain strided tensor")
            if tensor.device.type not in ("cpu", "cuda"):
                raise CannotCopyError(f"{name} is on {tensor.device}")
            chosen.setdefault(id(tensor), (name, tensor))
    spans = _spans(tensor for _, tensor in chosen.values())
    total = _bytes(spans)
    if total > most_bytes:
        raise CannotCopyError(f"the copies would need {total / 2**20:.3g} MiB of {most_bytes / 2**20:.3g} MiB")
    pieces: dict[int, tuple[int, Tensor]] = {}
    made: dict[int, Tensor] = {}
    pairs: list[Pair] = []
    with torch.no_grad():
        for key, (name, tensor) in chosen.items():
            if not tensor.numel():
                made[key] = tensor.detach()
                continue
            where = _storage(tensor)
            if where not in pieces:
                start, stop = spans[where]
                start -= start % _ALIGNED
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                flat.set_(tensor.untyped_storage(), start, (stop - start,), (1,))
                pieces[where] = start, flat.clone()
            start, piece = pieces[where]
            offset = int(tensor.storage_offset()) - start // tensor.element_size()
            made[key] = _view(piece.untyped_storage(), offset, tensor)
            pairs.append(Pair(name, _view(tensor.untyped_storage(), int(tensor.storage_offset()), tensor), made[key]))

    def replaced(tensor: Tensor) -> Tensor:
        return made.get(id(tensor), tensor)

    return Copies(map_tensors(args, replaced), map_tensors(dict(kwargs), replaced), pairs)


def copied_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Bytes that copies of all tensors of a call would need; 0 where some cannot be copied."""
    try:
        return _bytes(_spans(tensors_of([args, kwargs])))
    except (RuntimeError, NotImplementedError):  # sparse and nested tensors have no plain storage
        return 0


def _bytes(spans: Mapping[int, tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in spans.values())


def _spans(tensors: Iterable[Tensor]) -> dict[int, tuple[int, int]]:
    """For each storage, the first and one past the last byte that any of the tensors reaches."""
    spans: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        if tensor.numel():
            where = _storage(tensor)
            reach = sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = int(tensor.storage_offset()) * tensor.element_size()
            stop = start + (reach + 1) * tensor.element_size()
            least, most = spans.get(where, (start, stop))
            spans[where] = min(least, start), max(most, stop)
    return spans


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _view(storage: torch.UntypedStorage, offset: int, like: Tensor) -> Tensor:
    # With a version counter of its own, and no inference tensor: writing to it disturbs no autograd graph.
    view = torch.empty(0, dtype=like.dtype, device=like.device)
    return view.set_(storage, offset, like.shape, like.stride())


class Generators:
    """The states of torch's generators (CPU and ``devices``), of ``random``, and of numpy where it is loaded.
    ``put_back`` skips unchanged generators: another thread that draws meanwhile would draw the same numbers again."""

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._torch = torch.get_rng_state()
        # The generator of a CUDA device lives on the host: seed and offset of Philox.
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}
        self._random = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = None if numpy is None else numpy.random.get_state(legacy=False)

    def put_back(self) -> None:
        if not torch.equal(torch.get_rng_state(), self._torch):
            torch.set_rng_state(self._torch)
        for device, state in self._cuda.items():
            if not torch.equal(torch.cuda.get_rng_state(device), state):
                torch.cuda.set_rng_state(state, device)
        if random.getstate() != self._random:
            random.setstate(self._random)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self._numpy is not None:
            was, now = self._numpy["state"], numpy.random.get_state(legacy=False)["state"]
            if now["pos"] != was["pos"] or (now["key"] != was["key"]).any():
                numpy.random.set_state(self._numpy)
