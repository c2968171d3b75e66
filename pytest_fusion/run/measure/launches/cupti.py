"""CUPTI's records of one call, trusted only if none can be missing.

Kineto silently drops events at the start of a session (pytorch#192021), more of them in older processes. So known
kernels (sentinels) run around each call, the first call's window is discarded, all other sentinels must be there, and
three calls must agree in every name.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from pytest_fusion.run.measure.launches.graph_nodes import readable
from pytest_fusion.run.measure.launches.launch_count import Counts, Uncounted, named
from pytest_fusion.run.measure.timing.roofline import Activity

# The kernel of ``torch.cuda._sleep``, which no other code launches.
SENTINEL: Final = "spin_kernel"
SENTINELS: Final = 3
WINDOWS: Final = 3
_CYCLES = 1000
_SESSIONS = 3
# Device activities in traces of torch 2.6 to 2.13. Names do not suffice: SDPA's fused kernel has "Mem" in its name.
_KINDS: Final = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}

_US: Final = 1e-6


def profiled(
    call: Callable[[], Any], device: torch.device, *, prepare: Callable[[], None] | None = None
) -> Counts | Uncounted:
    """The launches of one call on a CUDA device, on any stream. Raises what the call raises. ``prepare`` runs uncounted
    before each call. A first session takes seconds (CUPTI starts), later ones milliseconds."""
    prepare = prepare or (lambda: None)
    with torch.cuda.device(device):
        prepare()
        call()
        for _ in range(_SESSIONS):
            found = counts_of(_session(call, device, prepare))
            if isinstance(found, Counts):
                break
    return found


def activities(call: Callable[[], Any], device: torch.device) -> list[Activity] | Uncounted:
    """The device activities of one call, on any stream, in order of time. Raises what the call raises."""
    with torch.cuda.device(device):
        call()
        found = _inside(_session(call, device, lambda: None))
    return found if isinstance(found, Uncounted) else activities_of(found[-1])


def activities_of(events: Sequence[Mapping[str, Any]]) -> list[Activity]:
    """Events of a trace in Chrome's format (microseconds) as activities."""
    first = float(events[0]["ts"]) if events else 0.0
    return [
        Activity(
            readable(str(event["name"])),
            _KINDS[str(event["cat"])],
            (float(event["ts"]) - first) * _US,
            float(event.get("dur", 0.0)) * _US,
        )
        for event in events
    ]


def _session(call: Callable[[], Any], device: torch.device, prepare: Callable[[], None]) -> list[dict[str, Any]]:
    """The device's records of ``WINDOWS`` calls and one before them, in order of time."""
    from torch.profiler import ProfilerActivity, profile

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CUDA]) as session:
            for _ in range(WINDOWS + 1):
                prepare()
                _sentinels(device)
                result = call()
                torch.cuda.synchronize(device)
                _sentinels(device)
                del result
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            session.export_chrome_trace(str(path))
            return device_events(json.loads(path.read_text(encoding="utf-8", errors="replace")))


def _sentinels(device: torch.device) -> None:
    torch.cuda.synchronize(device)
    for _ in range(SENTINELS):
        torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)


def device_events(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The device activities of a trace in Chrome's format, in order of time."""
    events = [event for event in trace.get("traceEvents", ()) if event.get("cat") in _KINDS and "ts" in event]
    return sorted(events, key=lambda event: float(event["ts"]))


def counts_of(events: Iterable[Mapping[str, Any]]) -> Counts | Uncounted:
    """The counts of the last three windows if they agree; ``SENTINELS`` sentinels stand on either side of each."""
    inside = _inside(list(events))
    if isinstance(inside, Uncounted):
        return inside
    found = [Counter((_KINDS[str(event["cat"])], readable(str(event["name"]))) for event in one) for one in inside]
    first = found[0]
    if any(window != first for window in found):
        listed = ", ".join(
            str(sum(count for (kind, _), count in window.items() if kind == "kernel")) for window in found
        )
        return Uncounted(f"equal calls did not launch the same under the profiler ({listed} kernels)")
    totals = {kind: sum(n for (k, _), n in first.items() if k == kind) for kind in _KINDS.values()}
    names = named(name for (kind, name), n in first.items() if kind == "kernel" for _ in range(n))
    return Counts(totals["kernel"], totals["memcpy"], totals["memset"], names, "profiler")


def _inside(events: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]] | Uncounted:
    """The events between the sentinels before and after each of the last ``WINDOWS`` calls."""
    places = [i for i, event in enumerate(events) if SENTINEL in str(event["name"])]
    wanted = 2 * SENTINELS * WINDOWS
    most = 2 * SENTINELS * (WINDOWS + 1)
    # Only sentinels of the first window may be missing.
    if not wanted <= len(places) <= most:
        return Uncounted(f"the profiler recorded {len(places)} of {most} kernels that are known to have run")
    places = places[-wanted:]
    found: list[list[Mapping[str, Any]]] = []
    for start in range(0, wanted, 2 * SENTINELS):
        before, after = places[start : start + SENTINELS], places[start + SENTINELS : start + 2 * SENTINELS]
        if before[-1] - before[0] != SENTINELS - 1 or after[-1] - after[0] != SENTINELS - 1:
            return Uncounted("something else ran between kernels that were launched one after the other")
        found.append(list(events[before[-1] + 1 : after[0]]))
    return found
