"""Atomics on arrays, in one of a GPU's possible orders: program by program, then in the order of the block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array, bits


def _groups(elements: Array) -> tuple[Array, Array, Array]:
    """Lanes sorted by element (stable), and for each element the start and number of its lanes."""
    order = np.argsort(elements, kind="stable")
    ordered = elements[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if ordered.size else np.zeros(0, int)
    counts = np.diff(np.append(starts, ordered.size))
    return order, starts, counts


def _turns(elements: Array) -> Iterator[Array]:
    """Yield lanes that run together: the first of every element, then the second, and so on."""
    order, starts, counts = _groups(elements)
    for turn in range(int(counts.max()) if counts.size else 0):
        yield order[starts[counts > turn] + turn]


def fold(function: Any, elements: Array, values: Array, memory: Array) -> tuple[Array, Array]:
    """``memory[e] = function(memory[e], value)``; the value that each lane found, and whether it changed it."""
    found = np.empty(values.shape, values.dtype)
    changed = np.zeros(values.shape, np.bool_)
    order, starts, counts = _groups(elements)
    if counts.size and int(counts.max()) > counts.size and hasattr(function, "accumulate"):
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            lanes = order[start : start + count]
            element = elements[lanes[0]]
            with_old = np.concatenate([memory[element : element + 1], values[lanes]])
            running = function.accumulate(with_old, dtype=values.dtype)
            found[lanes] = running[:-1]
            changed[lanes] = _differ(running[1:], running[:-1])
            memory[element] = running[-1]
        return found, changed
    for lanes in _turns(elements):
        old = memory[elements[lanes]]
        new = function(old, values[lanes]).astype(values.dtype, copy=False)
        memory[elements[lanes]] = new
        found[lanes] = old
        changed[lanes] = _differ(new, old)
    return found, changed


def exchange(elements: Array, values: Array, memory: Array) -> tuple[Array, Array]:
    """``memory[e] = value``; the value that each lane found, and whether it changed it."""
    return fold(lambda old, new: new, elements, values, memory)


def read(elements: Array, values: Array, memory: Array) -> tuple[Array, Array]:
    """The value that each lane finds; nothing changes."""
    return memory[elements], np.zeros(elements.shape, np.bool_)


def compare_and_swap(expected: Array, elements: Array, values: Array, memory: Array) -> tuple[Array, Array]:
    """``memory[e] = value`` where its bits are those of ``expected``."""
    found = np.empty(values.shape, values.dtype)
    changed = np.zeros(values.shape, np.bool_)
    for lanes in _turns(elements):
        old = memory[elements[lanes]]
        equal = ~_differ(old, expected[lanes])
        memory[elements[lanes[equal]]] = values[lanes[equal]]
        found[lanes] = old
        changed[lanes] = equal & _differ(old, values[lanes])
    return found, changed


def _differ(a: Array, b: Array) -> Array:
    return np.asarray(bits(a) != bits(b))
