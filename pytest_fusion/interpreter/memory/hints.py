"""Checks of ``tl.multiple_of``, ``tl.max_contiguous`` and ``tl.max_constancy``, the basis of vector accesses.

A pointer's divisibility is that of its address in bytes; a block's is that of the first element of each contiguous run
(Triton's axis analysis), so ``multiple_of(pid * B + arange(0, B), B)`` is true. Triton's own tutorials put hints on
wrapped or clamped indices (``% M``, ``where(i < M, i, 0)``), and mask the lanes that break them in the result, so these
hints are not judged. The values of a block that still counts up somewhere show that it was wrapped. One that does not
(``i % 1``, the zeros of a last tile's ``where``) must keep the hint for its source indices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array
from pytest_fusion.interpreter.control import batch, tape
from pytest_fusion.interpreter.memory import memory_findings
from pytest_fusion.interpreter.memory.memory_findings import Finding

WRAPPED = "wrapped"


@dataclass(slots=True, eq=False)
class Unwrapped:
    """The integers that a remainder, a selection, a minimum or a maximum was made from: an attribute of its handle."""

    arrays: tuple[Array, ...]


def _values(tensor: type, input: Any, values: Any, name: str) -> list[int] | None:
    """One number per axis; ``None`` for a value that is no tensor (a loop's Python index)."""
    if not isinstance(input, tensor):
        return None
    listed = values if isinstance(values, list | tuple) else [values]
    numbers: list[int] = [int(v if isinstance(v, int) else v.value) for v in listed]
    if len(numbers) != max(1, len(input.shape)):  # type: ignore[attr-defined]
        raise ValueError(f"len(values) != len(input.shape) for {name}")
    return numbers


def multiple_of(tensor: type, input: Any, values: Any, **_: Any) -> Any:
    """Checks that the first element of each contiguous run is a multiple of the axis's value."""
    numbers = _values(tensor, input, values, "tt.divisibility")
    if numbers is not None and all(n > 0 for n in numbers):
        if input.dtype.is_ptr() and max(numbers, default=1) > tape.ALIGNMENT:
            tape.spoil()
        data = _integers(input) if not input.dtype.is_ptr() or input.shape else input.handle.data.astype(np.int64)
        if data is not None:
            for axis, number in enumerate(numbers):
                bad = _indivisible(data, axis + 1, number)
                if data.ndim > 1:
                    if _broken_runs(data, axis + 1):
                        continue
                    bad = _forgiven(input, bad, axis + 1, partial(_indivisible, axis=axis + 1, number=number))
                _report(input, bad, f"multiple_of promises {number}, but the value is {{}}")
    return input


def max_contiguous(tensor: type, input: Any, values: Any, **_: Any) -> Any:
    """Checks that each aligned group of that many elements counts up by one."""
    numbers = _values(tensor, input, values, "tt.contiguity")
    _grouped(
        input, numbers, 1, "max_contiguous promises {number} elements in a row, but {} is not followed by that plus one"
    )
    return input


def max_constancy(tensor: type, input: Any, values: Any, **_: Any) -> Any:
    """Checks that each aligned group of that many elements has one value."""
    numbers = _values(tensor, input, values, "tt.constancy")
    _grouped(input, numbers, 0, "max_constancy promises {number} equal elements, but {} is not followed by that")
    return input


def _integers(input: Any) -> Array | None:
    """The hinted numbers, int64; ``None`` if a hint is not judged (blocks of pointers)."""
    data: Array = np.asarray(input.handle.data)
    if input.dtype.is_ptr():
        return None
    return data.astype(np.int64) if data.dtype.kind in "iu" else None


def _broken_runs(data: Array, axis: int) -> bool:
    """Whether the axis was wrapped or clamped: it counts up by one except where it falls back or stays equal."""
    steps = np.diff(data, axis=axis)
    return bool(((steps < 0) | (steps == 0)).any()) and bool((steps == 1).any())


def _indivisible(data: Array, axis: int, number: int) -> Array:
    """Where the start of a run, or a scalar, is no multiple."""
    bad = np.asarray(data % number != 0)
    if data.ndim > 1:
        later = (slice(None),) * axis + (slice(1, None),)
        bad[later] &= np.diff(data, axis=axis) != 1
    return bad


def _apart(data: Array, axis: int, number: int, step: int) -> Array:
    """Where, within a group of that many, the next element is not ``step`` more; one shorter along the axis."""
    length = data.shape[axis]
    along = [1] * data.ndim
    along[axis] = length - 1
    inside = (np.arange(1, length) % min(number, length)) != 0
    return np.asarray((np.diff(data, axis=axis) != step) & inside.reshape(along))


def _forgiven(input: Any, bad: Array, axis: int, of: Callable[[Array], Array]) -> Array:
    """``bad`` without the lanes for which the hint is true of the indices before they were wrapped or clamped.

    Only a source that counts up somewhere excuses a lane: any hint is true of a clamp's bound, which is one number. A
    source of another rank is compared if its elements still are the block's.
    """
    unwrapped: Unwrapped | None = input.handle.attr.get(WRAPPED)
    if unwrapped is None or not bad.any():
        return bad
    shape = input.handle.data.shape[1:]
    for array in unwrapped.arrays:
        if array.size == array.shape[0] * int(np.prod(shape)) and array.ndim > 1:
            source = array.reshape(array.shape[0], *shape).astype(np.int64)
            if bool((np.diff(source, axis=axis) == 1).any()):
                bad = bad & of(source)
    return bad


def _grouped(input: Any, numbers: list[int] | None, step: int, text: str) -> None:
    if numbers is None or not input.shape:
        return
    data = _integers(input)
    if data is None:
        return
    for axis, number in enumerate(numbers):
        length = data.shape[axis + 1]
        if number < 2 or length < 2 or _broken_runs(data, axis + 1):
            continue
        apart = partial(_apart, axis=axis + 1, number=number, step=step)
        bad = _forgiven(input, apart(data), axis + 1, apart)
        before = (slice(None),) * (axis + 1) + (slice(0, -1),)
        _report(input, bad, text.replace("{number}", str(number)), data[before])


def _report(input: Any, bad: Array, text: str, data: Array | None = None) -> None:
    if not memory_findings.current().tracking:
        return
    now = batch.current
    if now.active is not None:
        bad = bad & now.active.reshape(-1, *(1,) * (bad.ndim - 1))
    if not bad.any():
        return
    position = np.unravel_index(int(np.argmax(bad)), bad.shape)
    shown = np.broadcast_to(input.handle.data if data is None else data, bad.shape)[position]
    site = memory_findings.site()
    row = position[0] if bad.shape[0] == now.count else 0
    x, y, z = (int(n) for n in now.programs[:, row])
    detail = text.replace("{}", str(shown))
    memory_findings.report(Finding("false-hint", *site.located, program=(x, y, z), count=int(bad.sum()), detail=detail))
