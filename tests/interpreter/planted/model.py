"""What a planted memory bug is, and the guarded memory that its tensors live in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

KNOWN = 0xA5
GUARD = 4096
Pairs = list[tuple[Tensor, Tensor]]
"""What kernels computed, each with what they should have."""


class Memory:
    """Tensors with storages of their own, cut out of one buffer that is full of known bytes.

    No tensor over the whole buffer is ever made: to whoever looks for storages, the bytes between two tensors belong
    to nobody, and may yet be read and written without harm by an access that nobody stopped.
    """

    def __init__(self, size: int = 1 << 18) -> None:
        self._bytes = bytearray([KNOWN]) * size
        self._mine = np.ones(size, np.bool_)
        # Descriptors want 16-byte alignment; numpy's view of the buffer is the one way to learn its address.
        self._next = -np.frombuffer(self._bytes, np.uint8).ctypes.data % 64

    def like(
        self,
        values: Tensor,
        strides: Sequence[int] | None = None,
        *,
        before: int = 0,
        after: int = 0,
        guard: int = GUARD,
    ) -> Tensor:
        """A tensor equal to ``values``, ``before`` and ``after`` elements of its storage left over at the ends."""
        strides = tuple(values.contiguous().stride() if strides is None else strides)
        reach = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True))
        count = before + reach + after
        start = self._next + -(-guard // 64) * 64
        stop = start + count * values.element_size()
        self._next = start + -(-(stop - start) // 64) * 64
        flat = torch.frombuffer(self._bytes, dtype=values.dtype, count=count, offset=start)
        tensor = flat.as_strided(values.shape, strides, before)
        if all(strides) or values.dim() == 0:
            tensor.copy_(values)
        else:
            tensor[tuple(slice(None if stride else 1) for stride in strides)] = values[
                tuple(slice(None if stride else 1) for stride in strides)
            ]
        given = torch.zeros(count, dtype=torch.bool)
        given.as_strided(values.shape, strides, before).fill_(True)
        self._mine[start:stop] = np.repeat(~given.numpy(), values.element_size())
        return tensor

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32, **layout: Any) -> Tensor:
        """Zeros, laid out as ``like`` does."""
        return self.like(torch.zeros(shape, dtype=dtype), **layout)

    def range(self, *shape: int, dtype: torch.dtype = torch.float32, **layout: Any) -> Tensor:
        """1, 2, 3, ...: no two elements alike, none of them zero."""
        return self.like(torch.arange(1, prod(shape) + 1).reshape(shape).to(dtype), **layout)

    def intact(self) -> bool:
        """Whether every byte that belongs to no tensor's element is as it was."""
        return bool((np.frombuffer(self._bytes, np.uint8)[self._mine] == KNOWN).all())


Run = Callable[[Memory, bool], Pairs]


@dataclass(frozen=True)
class Plant:
    """A planted bug: ``run(memory, True)`` launches the faulty kernel, ``run(memory, False)`` its honest twin."""

    name: str
    run: Run
    kernel: str
    kinds: frozenset[str]
    argument: str | None
    file: str
    lines: frozenset[int]
    details: dict[str, Any] = field(default_factory=dict)
    """Attributes that the finding has besides."""

    def honest(self, memory: Memory) -> Pairs:
        """The same launches, corrected."""
        return self.run(memory, False)


PLANTS: list[Plant] = []
HONEST: list[Callable[[Memory], Pairs]] = []


def plant(kernel: Any, *kinds: str, argument: str | None, faulty: Any = None, **details: Any) -> Callable[[Run], Run]:
    """Register a launcher whose ``kernel`` errs on the ``# BUG`` line of itself or of the function ``faulty``."""

    def register(run: Run) -> Run:
        function = inspect.unwrap((kernel if faulty is None else faulty).fn)
        source, start = inspect.getsourcelines(function)
        lines = frozenset(start + i for i, line in enumerate(source) if line.rstrip().endswith("# BUG"))
        assert lines, f"{function.__name__} marks no line"
        file = inspect.getsourcefile(function)
        assert file is not None
        name = getattr(run, "__name__", "").removeprefix("run_")
        PLANTS.append(Plant(name, run, kernel.fn.__name__, frozenset(kinds), argument, file, lines, details))
        return run

    return register


def honest(run: Callable[[Memory], Pairs]) -> Callable[[Memory], Pairs]:
    """Register a launcher of kernels in which nothing is wrong."""
    HONEST.append(run)
    return run
