"""What a canary costs its callers: ``python -m benchmarks.canary.overhead [--device cpu|cuda:0] [--seconds S]``.

First what it adds to a call of a function that does nothing, off and in shadow where the call is not compared: the
host's time alone. Then, on a GPU, a softmax of 16384 x 8192 behind a canary in shadow with the default policy, beside
the softmax itself, in blocks of either in random order: the GPU's time of calls that nobody waits for, and the
latencies of calls that somebody does.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from pytest_fusion.canary import Policy, canary

# Of the host's time: calls in a loop, loops of either in turn.
CALLS, LOOPS = 50_000, 15
ROWS, COLUMNS = 16384, 8192
# Calls of a block that nobody waits for, and of one whose calls are waited for.
STREAMED, AWAITED = 400, 200

Call = Callable[[Any], Any]
N = TypeVar("N", int, float)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.canary.overhead", description=__doc__)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=30.0, help="for the GPU's part")
    given = parser.parse_args()
    print("| a call of nothing, canary | added, ns, median | least | most |\n|---|---|---|---|")
    for words, policy in (("off", Policy(state="off")), ("shadow, not compared", Policy(state="shadow", shadow=0.0))):
        found = added_ns(policy)
        print(f"| {words} | {statistics.median(found):.0f} | {min(found):.0f} | {max(found):.0f} |", flush=True)
    if given.device != "cpu":
        with torch.cuda.device(given.device):
            _on_gpu(torch.device(given.device), given.seconds)


def added_ns(policy: Policy, *, calls: int = CALLS, loops: int = LOOPS) -> list[float]:
    """Nanoseconds that a canary with this policy adds to a call, one number for each pair of loops."""

    def nothing(x: object) -> object:
        return x

    kernel = canary("overhead", incumbent=nothing, candidate=nothing, policy=policy)
    try:
        return [1e9 * (_loop(kernel, calls) - _loop(nothing, calls)) / calls for _ in range(loops)]
    finally:
        kernel.close()


def _loop(call: Call, calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        call(None)
    return time.perf_counter() - begun


def percentile(samples: Sequence[N], share: float) -> N:
    """The sample below which this share of them lies."""
    return sorted(samples)[min(len(samples) - 1, int(share * len(samples)))]


def _on_gpu(device: torch.device, seconds: float) -> None:
    from reference_kernels.softmax import softmax

    kernel = canary("overhead", incumbent=softmax, candidate=softmax, policy=Policy(state="shadow", writes=()))
    sides: dict[str, Call] = {"alone": softmax, "behind a canary": kernel}
    x = torch.randn(ROWS, COLUMNS, device=device, dtype=torch.bfloat16)
    try:
        for call in sides.values():
            _streamed(call, x)
        streamed = _alternated(sides, lambda call: [_streamed(call, x)], seconds / 2)
        awaited = _alternated(sides, lambda call: _awaited(call, x), seconds / 2)
        counts = kernel.status()["counts"]
    finally:
        kernel.close()
    print("\n| softmax 16384 x 8192 | blocks | GPU's time a call, us | calls | p50, us | p99, us |")
    print("|---" * 6 + "|")
    for name in sides:
        each = 1e6 * statistics.fmean(streamed[name])
        tails = [f"{1e6 * percentile(awaited[name], share):.1f}" for share in (0.5, 0.99)]
        print(f"| {name} | {len(streamed[name])} | {each:.2f} | {len(awaited[name])} | {' | '.join(tails)} |")
    alone, behind = (statistics.fmean(streamed[name]) for name in sides)
    slow, slower = (percentile(awaited[name], 0.99) for name in sides)
    print(f"\nadded GPU time {100 * (behind / alone - 1):+.2f} %, p99 {100 * (slower / slow - 1):+.2f} %; {counts}")


def _alternated(sides: dict[str, Call], block: Callable[[Call], list[float]], seconds: float) -> dict[str, list[float]]:
    """Blocks of every side, in random order, for so many seconds."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    draw, until = random.Random(0), time.monotonic() + seconds
    while time.monotonic() < until:
        for name in draw.sample(list(sides), len(sides)):
            found[name] += block(sides[name])
    return found


def _streamed(call: Call, x: torch.Tensor) -> float:
    """Seconds of the GPU for a call, over a block of calls that nobody waits for."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(4_000_000)  # type: ignore[no-untyped-call]  # the host gets ahead
    start.record()
    for _ in range(STREAMED):
        call(x)
    end.record()
    torch.cuda.synchronize()
    return 1e-3 * float(start.elapsed_time(end)) / STREAMED


def _awaited(call: Call, x: torch.Tensor) -> list[float]:
    """Seconds from a call to its result, each waited for."""
    found = []
    for _ in range(AWAITED):
        begun = time.perf_counter()
        call(x)
        torch.cuda.current_stream().synchronize()
        found.append(time.perf_counter() - begun)
    return found


if __name__ == "__main__":
    main()
