"""Kernels compiled ahead by several processes, which launch each once: then the timed process finds them in the cache.

A launch and nothing less: which specialisation Triton compiles follows from sizes, strides and addresses.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.suite.measure import in_pass
from benchmarks.suite.model import LIGER, OURS, Row, Span
from benchmarks.suite.passes import UPSTREAM, upstream_of

# Each has a CUDA context and a problem's inputs and results, some ten GiB.
MOST = 10


def processes() -> int:
    """How many are worth starting here: two cores are left, and where there are few none is."""
    cores = len(os.sched_getaffinity(0))
    return min(MOST, cores - 2) if cores >= 4 else 0


def compile_ahead(arguments: Sequence[str], count: int, limit_s: float) -> str:
    """Run ``python -m benchmarks.suite warm --part i/count <arguments>`` for each part; what happened, in words."""
    begun = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.suite"]
    running = [
        subprocess.Popen(
            [*command, "warm", "--part", f"{part}/{count}", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for part in range(count)
    ]
    late = 0
    for each in running:
        try:
            each.wait(max(0.1, limit_s - (time.monotonic() - begun)))
        except subprocess.TimeoutExpired:
            each.kill()
            each.wait()
            late += 1
    failed = sum(each.returncode not in (0, -9) for each in running)
    words = f"{count} processes compiled ahead in {time.monotonic() - begun:.0f} s"
    return words + (f", {late} were stopped" if late else "") + (f", {failed} failed" if failed else "")


def warm(rows: Sequence[Row], part: int, count: int, device: torch.device, spans: Sequence[Span]) -> None:
    """Ours and Liger's of every ``count``-th row, once; what raises is left to the process that tells of it."""
    torch.set_num_threads(1)
    for row in rows[part::count]:
        _warmed(row, device, spans)
        torch.cuda.empty_cache()


def _warmed(row: Row, device: torch.device, spans: Sequence[Span]) -> None:
    try:
        problem = row.make(device, **row.sizes)
        for span in ("forward", "both") if row.backward and "both" in spans else ("forward",):
            inputs: dict[str, Any] = dict(problem.inputs)
            if span == "both":
                inputs[UPSTREAM] = upstream_of(problem.ours, inputs, problem.grads)
            for name, way in problem.ways().items():
                if name in (OURS, LIGER):
                    in_pass(way.call, problem, span)(**inputs)
        torch.cuda.synchronize(device)
    except Exception:  # noqa: BLE001 -- a cache is filled, nothing is told
        return
