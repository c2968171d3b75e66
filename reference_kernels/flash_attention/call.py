"""One call of attention as its launches take it: tensors of four dimensions, sizes, strides, and what the mask is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from reference_kernels._attention import LOG2_E, padded


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Queries and keys of a tile (powers of two, at least 16), warps and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Call:
    """Packed tensors have a batch of one here, and ``offsets``. ``before`` and ``after`` are how far a query sees from
    its position, ``None`` for any distance."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    offsets: torch.Tensor | None
    k_offsets: torch.Tensor | None
    before: int | None
    after: int | None
    scale: float

    @classmethod
    def of(
        cls,
        tensors: Sequence[torch.Tensor],
        offsets: torch.Tensor | None,
        k_offsets: torch.Tensor | None,
        causal: bool,
        window: int | None,
        scale: float,
    ) -> Call:
        """A window that no distance reaches is no mask, and its numbers then fit into 32 bits."""
        q, k, v = tensors if offsets is None else (each.unsqueeze(0) for each in tensors)
        far = window is None or window >= q.shape[1] + k.shape[1]
        before = None if far else window - 1  # type: ignore[operator]
        if k_offsets is None:
            k_offsets = offsets
        return cls(q, k, v, offsets, k_offsets, before, 0 if causal else before, scale)

    @property
    def group(self) -> int:
        """Heads of ``q`` for each of ``k`` and ``v``."""
        return self.q.shape[2] // max(self.k.shape[2], 1)

    def blocks(self, rows: int, size: int) -> int:
        """Blocks of ``size`` that cover ``rows``, those of any packed sequences included."""
        return triton.cdiv(rows, size) if self.offsets is None else rows // size + len(self.offsets) - 1

    def strides(self) -> tuple[int, ...]:
        """Those of ``q``, ``k`` and ``v``, four each."""
        return (*self.q.stride(), *self.k.stride(), *self.v.stride())

    def arguments(self) -> dict[str, Any]:
        """Arguments of every kernel by name."""
        absent = self.q  # stands in for what is not there, never dereferenced
        features = self.q.shape[3]
        wide = padded(features)
        return {
            "offsets_ptr": absent if self.offsets is None else self.offsets,
            "k_offsets_ptr": absent if self.k_offsets is None else self.k_offsets,
            "sequences": 1 if self.offsets is None else len(self.offsets) - 1,
            "heads": self.q.shape[2],
            "group": self.group,
            "rows": self.q.shape[1],
            "key_rows": self.k.shape[1],
            "features": features,
            "factor": self.scale * LOG2_E.value,
            "before": self.before or 0,
            "after": self.after or 0,
            "PACKED": self.offsets is not None,
            "HAS_BEFORE": self.before is not None,
            "HAS_AFTER": self.after is not None,
            "WHOLE": wide == features,
            "BLOCK_FEATURES": wide,
        }


def engine(call: Call, *tensors: torch.Tensor) -> bool:
    """Whether the copy engine of sm_90 brings tiles of all ``tensors``: not those of packed sequences, whose ends it
    does not know."""
    return call.offsets is None and all(map(_copied, tensors))


def described(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """``tensor`` as the copy engine takes it, in blocks of ``rows`` of one head; past the last row they hold 0."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, rows, 1, padded(tensor.shape[3])])


def _copied(tensor: torch.Tensor) -> bool:
    """16-byte steps and rows without gaps; and not float32, of which there is no product of tiles in shared memory."""
    steps = [step * tensor.itemsize for step in tensor.stride()[:3]]
    return (
        tensor.itemsize == 2
        and tensor.numel() > 0
        and tensor.data_ptr() % 16 == 0
        and tensor.stride(3) == 1
        and all(step > 0 and step % 16 == 0 for step in steps)
    )
