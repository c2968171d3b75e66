"""Frames below `call_in_large_frame` cost no mapping of memory, at whatever depth most calls are made."""

from __future__ import annotations

import sys

import pytest

from pytest_fusion.run.process.preload import call_in_large_frame

resource = pytest.importorskip("resource")
CALLS = 300


def _leaf(a: int, b: int = 0, c: int = 0) -> int:
    return a + b + c


def _faults(depth: int) -> int:
    """Pages that were mapped in while one function was called over and over this deep."""
    if depth:
        return _faults(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for number in range(CALLS):
        _leaf(number)
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def test_no_depth_maps_memory_at_each_call() -> None:
    """Without room some depth does, where the interpreter keeps frames in chunks of 16 KiB."""
    depths = range(400)
    if max(map(_faults, depths)) < CALLS:
        pytest.skip(f"{sys.implementation.name} {sys.version.split()[0]} maps nothing for frames")
    assert call_in_large_frame(lambda: max(map(_faults, depths))) < CALLS / 10


def test_results_and_exceptions_come_through() -> None:
    """As of a plain call, with the caller's depth of recursion left as it was."""

    def fails() -> None:
        raise ValueError("mine")

    assert call_in_large_frame(lambda: call_in_large_frame(lambda: 7)) == 7
    with pytest.raises(ValueError, match="mine"):
        call_in_large_frame(fails)
