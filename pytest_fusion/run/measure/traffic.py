"""Bytes that a call must move, and floating-point operations of its products: the same on every machine.

*Algorithmic* bytes are the inputs and outputs once: what a perfectly fused kernel moves. The reference's are a sum over
its operations, and each reads its operands from memory and writes its results there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from pytest_fusion.case.containers import tensors_of
from pytest_fusion.interpreter.bridge.dispatch import DispatchMode, schema, written_by


@dataclass(slots=True)
class Traffic:
    """``bytes`` over the operations of a call, ``operations`` that moved them, ``flops`` of its matrix products (two
    per multiply-add, as in ``torch.utils.flop_counter``), ``largest``: the most elements that one operation makes."""

    bytes: int = 0
    operations: int = 0
    flops: int = 0
    largest: int = 0


def extent(tensor: Tensor) -> tuple[Any, int]:
    """The part of a storage that a tensor shows, as a key, and its bytes: an expanded dim shows one element."""
    seen = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    count = math.prod(size for size, _ in seen) if tensor.numel() else 0
    key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(seen), tensor.dtype)
    return key, count * tensor.element_size()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the elements of ``tensors``; those of equal views count once."""
    return sum(dict(extent(tensor) for tensor in tensors).values())


def algorithmic_bytes(inputs: Iterable[Any], outputs: Any) -> int:
    """The tensors among ``inputs`` and ``outputs`` (any nesting), each moved once; written inputs count in both."""
    return sum(bytes_of(tensors_of(side)) for side in (list(inputs), outputs))


class _Ledger(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._overloadpacket in flop_registry:
            self.found.flops += int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
        facts = schema(func)
        moved = tensors_of((args, kwargs))
        made = tensors_of(result)
        if facts.empty or facts.view or facts.name in ("detach_", "_local_scalar_dense") or not made:
            return result
        written = written_by(func, args, kwargs) if facts.name in ("copy_", "fill_", "zero_") else []
        reads = [t for t in moved if not any(t is w for w in written)]
        amount = bytes_of(reads) + bytes_of(made)
        self.found.largest = max(self.found.largest, sum(t.numel() for t in made))
        self.found.bytes += amount
        self.found.operations += bool(amount)
        return result


def traffic_of(function: Callable[[], object]) -> Traffic:
    """The traffic of ``function``'s ATen operations; kernels outside the dispatcher are not seen."""
    ledger = _Ledger()
    with ledger:
        function()
    return ledger.found
