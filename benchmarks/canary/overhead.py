"""What a canary costs its callers: ``python -m benchmarks.canary.overhead [--device cpu|cuda:0] [--seconds S]``.

First what it adds to a call of a function that does nothing, off and in shadow where the call is not compared: the
host's time alone. Then, on a GPU, softmaxes behind a canary in shadow with the default policy, beside the softmax
itself (twice, so that chance is seen), in turns of some seconds: the GPU's time of calls that nobody waits for, and the
latencies of calls that somebody does. The default policy copies the inputs of the smaller one alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from pytest_fusion.canary import Policy, canary

# Of the host's time: calls in a loop, loops of either in turn.
CALLS, LOOPS = 50_000, 15
SIZES = (4096, 4096), (16384, 8192)
# Calls of a block that nobody waits for, and of one whose calls are waited for.
STREAMED, AWAITED = 400, 200

Call = Callable[[Any], Any]
N = TypeVar("N", int, float)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.canary.overhead", description=__doc__)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=90.0, help="for the GPU's part")
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
    print("\n| softmax | | blocks | GPU's time a call, us | calls | p50, us | p99, us |")
    print("|---" * 7 + "|")
    told = [_beside(device, rows, columns, seconds / len(SIZES)) for rows, columns in SIZES]
    print("\n" + "\n".join(told))


def _beside(device: torch.device, rows: int, columns: int, seconds: float) -> str:
    """Prints a line for each side; what the canary adds, in words."""

    def softmax(x: torch.Tensor) -> torch.Tensor:
        # Torch's own takes the host 10 us: the GPU is what is waited for.
        return torch.softmax(x, dim=-1)

    kernel = canary("overhead", incumbent=softmax, candidate=softmax, policy=Policy(state="shadow", writes=()))
    sides: dict[str, Call] = {"alone": softmax, "alone again": softmax, "behind a canary": kernel}
    x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
    try:
        for call in sides.values():
            _streamed(call, x)
        streamed = _alternated(sides, lambda call: [_streamed(call, x)], seconds / 2)
        awaited = _alternated(sides, lambda call: _awaited(call, x), seconds / 2)
        counts = kernel.status()["counts"]
    finally:
        kernel.close()
    for name in sides:
        each = 1e6 * statistics.fmean(streamed[name])
        tails = [f"{1e6 * percentile(awaited[name], share):.1f}" for share in (0.5, 0.99)]
        numbers = f"{len(streamed[name])} | {each:.2f} | {len(awaited[name])} | {' | '.join(tails)}"
        print(f"| {rows} x {columns} | {name} | {numbers} |", flush=True)
    added = [
        f"{name}: GPU time {_more(statistics.fmean(streamed[name]), statistics.fmean(streamed['alone']))}, "
        + ", ".join(
            f"p{100 * share:g} {_more(percentile(awaited[name], share), percentile(awaited['alone'], share))}"
            for share in (0.5, 0.99)
        )
        for name in list(sides)[1:]
    ]
    return f"{rows} x {columns}, added to alone: {'; '.join(added)}; {counts}"


def _more(one: float, other: float) -> str:
    return f"{100 * (one / other - 1):+.2f} %"


def _alternated(sides: dict[str, Call], block: Callable[[Call], list[float]], seconds: float) -> dict[str, list[float]]:
    """Blocks of every side for so many seconds in all: one side for a while, then the next, and all of them backwards.

    What a canary may take is a share of the time that passes, and it passes on all sides: in turns of a block each it
    would spend on its own blocks what it has for three.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    turns = [*sides, *reversed(sides)]
    for name in turns:
        until = time.monotonic() + seconds / len(turns)
        while time.monotonic() < until:
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
