"""Loads, stores and atomics of all programs of a batch.

Lanes that a check rejects are not performed: a load gives the masked fill, a store changes nothing. Values move through
numpy views of the storages, 2-5 ns an element; Triton's own C++ loops take 40.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array
from pytest_fusion.interpreter.control import batch, tape
from pytest_fusion.interpreter.control.batch import aligned, broadcast, some
from pytest_fusion.interpreter.memory import memory_findings, tracking
from pytest_fusion.interpreter.memory.access import Access, launch
from pytest_fusion.interpreter.memory.regions import Origin
from pytest_fusion.interpreter.memory.touched import Touched
from pytest_fusion.interpreter.memory.undefined_lanes import masked_lanes

_Transfer = TypeVar("_Transfer", bound=Callable[..., Array | None])


def _recorded(transfer: _Transfer) -> _Transfer:
    """Also puts each call on the tape of the launch, if that is recorded."""

    @wraps(transfer)
    def performed(pointers: Array, origin: Origin | None, *operands: Any, **named: Any) -> Array | None:
        found = transfer(pointers, origin, *operands, **named)
        if (recording := tape.running()) is not None:
            arrays = [given for given in (*operands, *named.values()) if isinstance(given, np.ndarray)]
            recording.add(lambda *at: transfer(*at, *operands, **named), pointers, origin, (found, *arrays))
        return found

    return cast("_Transfer", performed)


@_recorded
def load(
    pointers: Array,
    origin: Origin | None,
    dtype: np.dtype[Any],
    mask: Array | None = None,
    other: Array | None = None,
) -> Array:
    """Values of ``dtype`` at ``pointers``; where masked off or rejected ``other``, else a fill."""
    if mask is not None:
        pointers, mask = aligned(pointers, mask)
    access = Access("out-of-bounds-load", pointers, origin, dtype.itemsize, mask)
    now = batch.current
    now.reads += 1
    now.widest = max(now.widest, pointers.size // pointers.shape[0])
    bits = np.dtype(f"u{dtype.itemsize}")
    rest: Array = masked_lanes(dtype, mask, pointers.shape) if other is None else np.asarray(other)
    if other is not None and other.ndim:
        rest = aligned(pointers, other)[1]
    rest = rest.astype(dtype, copy=False).view(bits)
    result: Array | None = None
    for region, view, elements, selected in access.targets():
        memory = region.typed(dtype.itemsize)
        if memory.size == 0:
            continue
        if memory_findings.current().tracking:
            tracking.track_load(access, region, view, elements, selected)
        values = memory.take(elements, mode="clip")
        if selected is None:
            result = values
        else:
            result = np.where(selected, values, rest if result is None else result)
    if result is None:
        shape = np.broadcast_shapes(pointers.shape, rest.shape if rest.ndim else (1,) * pointers.ndim)
        result = broadcast(rest, shape).copy()
    return np.ascontiguousarray(result).view(dtype)


@_recorded
def store(pointers: Array, origin: Origin | None, values: Array, mask: Array | None = None) -> None:
    """Write ``values`` to ``pointers`` where ``mask`` holds; of equal addresses the last lane in turn wins."""
    itemsize = values.dtype.itemsize
    bits = np.ascontiguousarray(values).view(f"u{itemsize}")
    if mask is None:
        pointers, bits = aligned(pointers, bits)
    else:
        pointers, bits, mask = aligned(pointers, bits, mask)
    shape = np.broadcast_shapes(pointers.shape, bits.shape, mask.shape if mask is not None else (1,))
    pointers = broadcast(pointers, shape)
    now = batch.current
    now.widest = max(now.widest, pointers.size // shape[0])
    access = Access("out-of-bounds-store", pointers, origin, itemsize, mask)
    for region, view, elements, selected in access.targets():
        if selected is not None:
            selected = broadcast(selected, shape)
        selected = tracking.own_lanes(access, region, view, elements, selected)
        if selected is not None and not some(selected):
            continue
        lanes = Touched(elements, selected, itemsize)
        wanted = lanes.of(bits)
        region.save()
        memory = region.typed(itemsize)
        now.changes += 1
        into = memory_findings.current()
        if into.tracking:
            tracking.track_store(access, region, view, lanes, wanted, memory)
            if into.immediate:
                tracking.report_lost(access, region, view, lanes, tracking.lost_before(lanes, wanted))
        lanes.put(wanted, memory)
        if into.tracking and not into.immediate:
            tracking.report_lost(access, region, view, lanes, tracking.lost_after(lanes, wanted, memory))


Update = Callable[..., tuple[Array, Array]]


@_recorded
def atomic(
    pointers: Array,
    origin: Origin | None,
    values: Array,
    mask: Array | None,
    update: Update,
    *,
    expected: Array | None = None,
    acquire: bool,
    release: bool,
) -> Array:
    """A read-modify-write of every lane, one after the other: program by program, lane by lane.

    ``update([expected,] elements, values, memory)`` runs lanes in order and returns the value that each found and
    whether it changed its element. A masked lane gets zero.
    """
    given = [a for a in (pointers, values, mask, expected) if a is not None]
    arrays = aligned(*given)
    count = batch.current.count
    batch.current.reads += 1
    shape = np.broadcast_shapes((count, *(1,) * (arrays[0].ndim - 1)), *(a.shape for a in arrays))
    pointers = broadcast(arrays[0], shape)
    wanted = broadcast(arrays[1], shape)
    whole = broadcast(arrays[2], shape) if mask is not None else None
    access = Access("out-of-bounds-store", pointers, origin, values.dtype.itemsize, whole)
    found = np.zeros(shape, values.dtype)
    for region, view, elements, selected in access.targets():
        lanes = np.ones(shape, np.bool_) if selected is None else broadcast(selected, shape)
        own = tracking.own_lanes(access, region, view, elements, lanes)
        lanes = lanes if own is None else own
        if not some(lanes):
            continue
        touched = Touched(elements, lanes, values.dtype.itemsize)
        region.save()
        if memory_findings.current().tracking:
            tracking.track_atomic(access, region, view, touched)
        memory = region.typed(values.dtype.itemsize).view(values.dtype)
        turns = touched.turns
        operands: tuple[Array, ...] = (touched.flat[turns], wanted[lanes][turns], memory)
        if expected is not None:
            operands = (broadcast(arrays[-1], shape)[lanes][turns], *operands)
        old, changed = update(*operands)
        found[lanes] = old[turns]
        batch.current.changes += int(bool(changed.any()))
    if pointers.size == count:
        lanes = np.ones(count, np.bool_) if access.mask is None else broadcast(access.mask, shape).reshape(-1)
        numbers = batch.current.numbers[lanes] + 1
        launch().order.atomic(pointers.reshape(-1)[lanes], numbers, acquire=acquire, release=release)
    return found
