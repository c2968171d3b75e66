"""Calls over copies of their inputs as one CUDA graph, replayed between two events; or events around plain calls.

A graph excludes the host: it times the device. All functions are references saved at import (`pristine`). Work on a
stream that leaves the captured one and does not join it makes the capture fail. No graph has the work of a stream that
never waits for the captured one; two methods of counting launches detect that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pytest_fusion.case.containers import map_tensors, tensors_of
from pytest_fusion.run import capture, pristine
from pytest_fusion.run.bits import storage_of
from pytest_fusion.run.measure.traffic import bytes_of
from pytest_fusion.run.memory.region import distinct
from pytest_fusion.spec.wording import brief

# Bytes touched between two calls on the same copy, in units of the last-level cache.
COLD = 5
# Calls of a sample: enough that a timer's microsecond does not count, and few, because capturing each takes time.
FEWEST, MOST = 10, 300


def copies_needed(touched: int, cache: int) -> int:
    """How many copies of ``touched`` bytes fill ``COLD`` caches; within ``FEWEST`` to ``MOST``."""
    return min(MOST, max(FEWEST, math.ceil(COLD * cache / max(touched, 1))))


def rotated(logical: Mapping[str, Any], count: int, room: int) -> tuple[list[dict[str, Any]], bool]:
    """``count`` sets of arguments in own tensors, and whether there are so many; fewer if they exceed ``room`` bytes.
    Calls that share a set are warmer. A device's sets are one piece of memory, as addresses matter: eight times anew on
    an H200, ten separate copies of 33 MB took 18.4 to 19.2 us to read, those in one piece 18.8 to 18.9."""
    own = tensors_of(logical)
    size = max(1, bytes_of(own))
    made_sets = max(1, min(count, room // size))
    rooms: Counter[torch.device] = Counter()
    for t in own:
        rooms[t.device] += _room(t)
    pieces = {device: _Piece(made_sets * room, device) for device, room in rooms.items()}
    sets = [
        {name: map_tensors(value, lambda t: pieces[t.device].twin(t)) for name, value in logical.items()}
        for _ in range(made_sets)
    ]
    return [sets[i % made_sets] for i in range(count)], made_sets == count


# The alignment of torch's caching allocator.
_ALIGNMENT = 512


class _Piece:
    """Memory from which tensors are cut, one after the other."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._at = 0

    def twin(self, t: torch.Tensor) -> torch.Tensor:
        """A copy in a storage of its own, with the strides of ``t``; without them if elements overlap."""
        if t.layout is not torch.strided or not t.numel():
            return t.clone()
        strides, extent = _laid(t)
        storage = storage_of(self._memory, self._at, extent)
        self._at += _room(t)
        made = torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, 0, t.shape, strides)
        return made.copy_(t)


def twin(t: torch.Tensor) -> torch.Tensor:
    """A copy placed like those of ``rotated``, in memory of its own."""
    return _Piece(_room(t), t.device).twin(t)


def _laid(t: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """The strides of a copy, and its extent in bytes."""
    strides = t.stride()
    if t.is_contiguous() or not distinct(t.shape, strides):
        strides = torch.empty(t.shape, device="meta").stride()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, strides, strict=True))
    return strides, reach * t.element_size()


def _room(t: torch.Tensor) -> int:
    if t.layout is not torch.strided or not t.numel():
        return 0
    return -(-_laid(t)[1] // _ALIGNMENT) * _ALIGNMENT


_MS = 1e-3
# Saved before any kernel is imported.
_EVENT, _RECORD, _ELAPSED = torch.cuda.Event, torch.cuda.Event.record, torch.cuda.Event.elapsed_time


@dataclass(slots=True)
class Replayed:
    """A repeatable batch of calls. ``timer`` is ``"graph"`` or, for the reason ``why``, ``"events"``."""

    timer: Literal["graph", "events"]
    calls: int
    why: str
    _run: Callable[[], None]
    _device: torch.device
    # Owners of the graph's memory. The next call would reuse freed outputs, still in the cache; the next capture
    # empties torch's cache and unmaps freed inputs.
    _held: list[Any]

    def seconds(self) -> float:
        """Device seconds a call, over one run of the batch; waits for it. A graph first runs once untimed: the previous
        run used other memory, and an idle device begins late. The last calls of that run are far from the first in
        memory, which stay cold. Calls outside a graph may leave work on streams without events: there the host's clock
        times all of the device's work."""
        begun = pristine.perf_counter()
        start, end = (_EVENT(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        stream = torch.cuda.current_stream(self._device)
        if self.timer == "graph":
            self._run()
        _RECORD(start, stream)
        self._run()
        _RECORD(end, stream)
        pristine.synchronize(self._device)
        whole = pristine.perf_counter() - begun if self.timer == "events" else 0.0
        return max(float(_ELAPSED(start, end)) * _MS, whole) / self.calls


def replayed(
    function: Callable[..., Any], sets: Sequence[Mapping[str, Any]], device: torch.device, *, plain: str = ""
) -> Replayed:
    """``function(**set)`` for each set, in order, to be timed. Raises what the function raises outside of a capture.
    ``plain``: why a graph would lack some of its work (see ``launches.count``); then none is captured."""

    def call(turn: int) -> list[Any]:
        with torch.no_grad():
            every = sets if turn == capture.WARM_UPS else sets[turn % len(sets) :][:1]
            return [function(**arguments) for arguments in every]

    if plain:
        for turn in range(capture.WARM_UPS):
            call(turn)
        return _by_events(function, sets, device, plain)
    try:
        graph, held = capture.captured(call, device)
    except capture.CaptureFailed as error:
        return _by_events(function, sets, device, brief(error.__cause__ or error))
    return Replayed("graph", len(sets), "", graph.replay, device, [graph, held, sets])


def _by_events(
    function: Callable[..., Any], sets: Sequence[Mapping[str, Any]], device: torch.device, why: str
) -> Replayed:
    def run() -> None:
        with torch.no_grad():
            for arguments in sets:
                function(**arguments)

    return Replayed("events", len(sets), why, run, device, [])
