"""The programs that run together, and the active ones among them; docs/internals/interpreter.md has the idea."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array


class NotBatchedError(Exception):
    """A launch cannot run as one batch, for the reason in the message, and runs again, one program after the other."""


class WaitsForAnotherError(RuntimeError):
    """A program waits for another program of the same launch that cannot run before it ends."""


class EndlessLoopError(RuntimeError):
    """A loop changes nothing, and nothing that it reads another program can change; or it has far too many turns."""


@dataclass(slots=True)
class Batch:
    """``programs``: ids (3, count) of x, y, z; ``first``: number of the first one in the order of the launch.

    ``active``: bool (count,), ``None`` if all are. ``turned``: a program's lanes on one element run last to first.
    """

    programs: Array
    first: int = 0
    active: Array | None = None
    turned: bool = False
    # The largest block so far, in elements a program; it sets the size of the next batch.
    widest: int = 1
    # Stores and atomics that changed memory; a loop that changes nothing never ends.
    changes: int = 0
    # Loads and atomics: another program may change what a loop reads.
    reads: int = 0
    clock: int = 0
    _numbers: Array | None = field(default=None, repr=False)

    @property
    def count(self) -> int:
        return int(self.programs.shape[1])

    @property
    def numbers(self) -> Array:
        """Position of each program in the order of the launch, int64 (count,)."""
        if self._numbers is None:
            self._numbers = np.arange(self.first, self.first + self.count, dtype=np.int64)
        return self._numbers

    def empty(self) -> bool:
        """Whether no program is active: all that would run here have returned."""
        return self.active is not None and not bool(self.active.any())

    def of_active(self, scalar: Array) -> Array:
        """The entries of a scalar (programs,) that belong to active programs; one entry if all agree."""
        if self.active is None or scalar.shape[0] == 1:
            return scalar
        return np.asarray(scalar[self.active])


def single(count: int = 1) -> Batch:
    """A batch outside of any launch."""
    return Batch(np.zeros((3, count), np.int64))


# Counting takes 0.4 us; `any` takes 1.0 us, and less for each further element because it stops at the first.
_FEW = 4096

current: Batch = single()


@contextmanager
def running(batch: Batch) -> Iterator[Batch]:
    global current
    before, current = current, batch
    try:
        yield batch
    finally:
        current = before


def broadcast(array: Array, shape: tuple[int, ...]) -> Array:
    """`numpy.broadcast_to` in less than half the time; ``array`` itself if it fits. Raises ``ValueError`` like it."""
    if array.shape == shape:
        return array
    lead = len(shape) - array.ndim
    # numpy exports no buffer of ml_dtypes' types.
    if lead < 0 or array.dtype.kind == "V" or not array.flags.c_contiguous:
        return np.broadcast_to(array, shape)
    strides = [0] * lead
    for size, stride, wanted in zip(array.shape, array.strides, shape[lead:], strict=True):
        if size != wanted and size != 1:
            return np.broadcast_to(array, shape)
        strides.append(0 if size == 1 else stride)
    return np.ndarray(shape, array.dtype, array, 0, tuple(strides))


def some(lanes: Array) -> bool:
    """Whether any of these bools is true. For a few thousand, calling `ndarray.any` takes longer than its work."""
    return bool(np.count_nonzero(lanes) if lanes.size <= _FEW else lanes.any())


def lanes(array: Array, count: int) -> Array:
    """``array`` with its program axis broadcast to ``count``."""
    return broadcast(array, (count, *array.shape[1:]))


def aligned(*arrays: Array) -> list[Array]:
    """``arrays`` with the rank of the largest: a scalar (programs,) gets its axes behind the program axis."""
    rank = max(a.ndim for a in arrays)
    return [a if a.ndim == rank else a.reshape(a.shape[:1] + (1,) * (rank - a.ndim) + a.shape[1:]) for a in arrays]


def agreed(scalar: Array, what: str) -> int | float | bool:
    """The value that a scalar has for every active program; raises ``NotBatchedError`` on ``what`` if they differ."""
    values = current.of_active(scalar.reshape(scalar.shape[0], -1)[:, 0])
    if values.size == 0:
        values = scalar.reshape(-1)[:1]
    first = values[0]
    if values.size > 1 and not bool((values == first).all()):
        raise NotBatchedError(f"{what} differs between programs")
    result: int | float | bool = first.item()
    return result
