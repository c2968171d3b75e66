"""The profiler's records are believed only with every sentinel in its place."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_fusion.run.measure.launches import Counts, Uncounted
from pytest_fusion.run.measure.launches.cupti import SENTINELS, WINDOWS, counts_of, device_events

Event = tuple[str, str]
GUARD: list[Event] = [("kernel", "at::cuda::spin_kernel(long)")] * SENTINELS
CALL: list[Event] = [
    ("kernel", "void fmha_cutlassF_f16_aligned_64x64_rf_sm80_MemEff(Params)"),
    ("gpu_memcpy", "Memcpy DtoD"),
    ("gpu_memset", "Memset"),
]
PREPARED: list[Event] = [("kernel", "copy_back")]


def trace(*calls: list[Event]) -> list[dict[str, Any]]:
    """A session of these calls, in the order in which they ran."""
    events = [event for call in calls for event in [*PREPARED, *GUARD, *call, *GUARD]]
    return [{"cat": kind, "name": name, "ts": float(i)} for i, (kind, name) in enumerate(events)]


WHOLE = trace(*[CALL] * (WINDOWS + 1))


def test_a_whole_trace_counts() -> None:
    """What lies between the sentinels of a call is the call's, told apart by activity and not by name."""
    name = "fmha_cutlassF_f16_aligned_64x64_rf_sm80_MemEff"
    assert counts_of(WHOLE) == Counts(1, 1, 1, ((name, 1),), "profiler")


def test_an_empty_call_counts_nothing() -> None:
    """A call that launches nothing is a number too."""
    assert counts_of(trace(*[[]] * (WINDOWS + 1))) == Counts(0, 0, 0, (), "profiler")


@pytest.mark.parametrize("lost", range(2 * SENTINELS + len(CALL) + 1))
def test_only_the_first_window_may_be_lost(lost: int) -> None:
    """Kineto drops what came first; up to the end of the first window that does no harm."""
    assert isinstance(counts_of(WHOLE[lost:]), Counts)


@pytest.mark.parametrize("dropped", range(2 * SENTINELS + len(CALL) + 1, len(WHOLE)))
def test_a_later_loss_is_seen(dropped: int) -> None:
    """Any single record of the windows that count makes it no number, unless it is what `prepare` did."""
    found = counts_of([*WHOLE[:dropped], *WHOLE[dropped + 1 :]])
    assert isinstance(found, Counts) == (WHOLE[dropped]["name"] == "copy_back")


def test_calls_that_differ_are_no_number() -> None:
    """Three calls must be equal, whatever the first one did."""
    more = [*CALL, ("kernel", "other")]
    assert isinstance(counts_of(trace(more, *[CALL] * WINDOWS)), Counts)
    found = counts_of(trace(CALL, CALL, more, CALL))
    assert isinstance(found, Uncounted)
    assert "(1, 2, 1 kernels)" in found.reason


def test_no_records_at_all_are_no_number() -> None:
    """Another tool may own CUPTI."""
    assert counts_of([]) == Uncounted("the profiler recorded 0 of 24 kernels that are known to have run")


def test_a_call_that_launches_the_sentinel_is_no_number() -> None:
    """It could not be told from those that guard it."""
    assert isinstance(counts_of(trace(*[[*CALL, GUARD[0]]] * (WINDOWS + 1))), Uncounted)


def test_only_the_device_counts() -> None:
    """Annotations, synchronisation and what the host did are left out, and time orders the rest."""
    events = [
        {"cat": "kernel", "name": "b", "ts": "2.5"},
        {"cat": "gpu_user_annotation", "name": "mine", "ts": 0},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0},
        {"cat": "cuda_sync", "name": "Context Sync", "ts": 0},
        {"ph": "M", "name": "process_name"},
        {"cat": "gpu_memcpy", "name": "a", "ts": 1},
    ]
    assert [event["name"] for event in device_events({"traceEvents": events})] == ["a", "b"]
