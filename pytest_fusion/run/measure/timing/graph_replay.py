"""Calls as one CUDA graph, replayed between two events; events around plain calls where they cannot be captured.

A graph has no host in it: what is timed is the device. Everything comes from references saved at import (``genuine``).
Work on a stream that leaves the captured one and does not join it makes the capture fail; work on a stream that never
waited for it is in no graph, which shows where launches are counted by two methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pytest_fusion.run import capture, pristine
from pytest_fusion.spec.wording import brief

_MS = 1e-3
# As they were before any kernel was imported.
_EVENT, _RECORD, _ELAPSED = torch.cuda.Event, torch.cuda.Event.record, torch.cuda.Event.elapsed_time


@dataclass(slots=True)
class Replayed:
    """A batch of calls that can be run again. ``timer`` is ``"graph"`` or, with the reason ``why``, ``"events"``."""

    timer: Literal["graph", "events"]
    calls: int
    why: str
    _run: Callable[[], None]
    _device: torch.device
    # What the graph's memory belongs to: freed outputs would be handed to the next call, still in the cache, and freed
    # inputs are unmapped when the next capture empties torch's cache.
    _held: list[Any]

    def seconds(self) -> float:
        """Device seconds a call, over one run of the batch; waits for it.

        A graph runs once before, untimed: what ran last had other memory, and a device that was idle begins late. The
        last calls of that run are far from the first ones in memory, which stay cold. Calls outside of a graph may
        leave work on streams that the events know nothing of: there all of the device's work counts, by the host's
        clock.
        """
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
    """``function(**set)`` for each set, in order, as something to time. Raises what the function raises outside.

    ``plain`` says why a graph would not have all of its work (see ``counting.count``): then it is called as it is.
    """

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
