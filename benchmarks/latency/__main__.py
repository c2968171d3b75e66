"""How well latencies are told on this GPU: ``python -m benchmarks.latency [--repeats N] [--device cuda:0]``.

Of a row-wise softmax and of a small relu: how far apart N medians are, what a thing against itself reads, and how often
a kernel made slower by 1, 2, 3 and 5 % is called slower, against itself in the same run and against a stored ratio.
``truly`` is what a measurement many times as long reads of the very kernel that is judged.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.judging.rates import beside
from benchmarks.latency.kernels import relu_kernel, softmax_kernel, spinning
from pytest_fusion.bench.baseline.bootstrap import Estimate, block_ratios, estimate
from pytest_fusion.bench.baseline.latency_judge import SAME_UNIT, Level, Noise, against_stored, judge
from pytest_fusion.bench.latency import against_itself, compared, timed
from pytest_fusion.bench.on_device import opened
from pytest_fusion.run.measure.launches.cupti import activities
from pytest_fusion.run.measure.launches.launch_count import Uncounted
from pytest_fusion.run.measure.timing.graph_replay import Replayed

# About 40 and 2.5 us on an H200.
PROBLEMS: dict[str, tuple[Any, int, int]] = {
    "softmax": (softmax_kernel, 8192, 4096),
    "relu": (relu_kernel, 2048, 256),
}
SLOWER = (0.0, 0.01, 0.02, 0.03, 0.05)
# Two slowdowns of which the time of a step follows; under the first, other programs may end after the one that spins.
_NEAR, _FAR = 0.08, 0.24
_STEP_S = 2e-9
# Precise measurements are means over so many runs.
_TRULY = 6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency", description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda:0")
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.cuda.set_device(device)
    here = opened(device)
    print(f"{here.facts['device_name']}, torch {torch.__version__}, {given.repeats} repeats\n")
    for name, (kernel, rows, width) in PROBLEMS.items():
        x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)

        def batch(spins: int, kernel: Any = kernel, x: torch.Tensor = x) -> Replayed:
            function = spinning(kernel, spins, device)
            return timed(function, {"input": x}, function(x), device, here.cache)[0]

        control = batch(0)
        noise, _ = against_itself(control)
        spins = _spins(batch, control, SLOWER)
        candidates = {slower: batch(steps) for slower, steps in zip(SLOWER, spins, strict=True)}
        truly = {slower: _read(candidate, control, _TRULY) for slower, candidate in candidates.items()}
        medians, runs, spent = [], dict[float, list[Estimate]](), []
        for turn in range(given.repeats):
            for slower, candidate in candidates.items():
                begun = time.perf_counter()
                blocks = compared(candidate, control, seed=turn)
                spent.append(time.perf_counter() - begun)
                runs.setdefault(slower, []).append(estimate(block_ratios(blocks.candidate, blocks.control)))
                if slower == 0:
                    medians.append(statistics.median(value for block in blocks.candidate for value in block))
        _told(name, medians, runs, truly, spent, noise)
        _span(spinning(kernel, 0, device), x, device, statistics.median(medians))


def _read(candidate: Replayed, control: Replayed, times: int) -> float:
    """How much slower, as a share; the mean over ``times`` measurements."""
    found = [compared(candidate, control, seed=1000 + turn) for turn in range(times)]
    return statistics.fmean(math.expm1(estimate(block_ratios(one.candidate, one.control)).ratio) for one in found)


def _spins(batch: Callable[[int], Replayed], control: Replayed, slower: Sequence[float]) -> list[int]:
    """The steps that make it slower by each of these shares, from a line through two measurements."""
    seconds = statistics.median(control.seconds() for _ in range(50))
    near, far = (round(share * seconds / _STEP_S) for share in (_NEAR, _FAR))
    low, high = (_read(batch(steps), control, 2) for steps in (near, far))
    each = (high - low) / (far - near)
    print(
        f"a step takes {1e9 * each * seconds:.2f} ns; {near} steps read {100 * low:+.2f} %, {far} {100 * high:+.2f} %"
    )
    return [max(0, round(near + (share - low) / each)) if share else 0 for share in slower]


def _told(
    name: str,
    medians: list[float],
    runs: dict[float, list[Estimate]],
    truly: dict[float, float],
    spent: list[float],
    noise: Noise,
) -> None:
    spread = 100 * (max(medians[:10]) / min(medians[:10]) - 1)
    print(
        f"{name}: {1e6 * statistics.median(medians):.2f} us, the first ten medians within {spread:.2f} %, all "
        f"{len(medians)} within {100 * (max(medians) / min(medians) - 1):.2f} %, "
        f"{statistics.median(spent):.2f} s a case (at most {max(spent):.2f}), A/A spread {100 * noise.spread:.3f} %"
        + (f", noisy: {noise.noisy}" if noise.noisy else "")
    )
    base = runs[0.0][0]
    # As of one session of this very GPU.
    known = Level(base.ratio, math.hypot(math.sqrt(2) * SAME_UNIT, base.error), SAME_UNIT, known=False)
    print("| slower by | truly | reads | half interval | incumbent | stored |\n|---|---|---|---|---|---|")
    for slower, found in runs.items():
        incumbent = [judge([beside(one, noise)])[0].verdict for one in found]
        stored = [judge([against_stored(one, known, noise)])[0].verdict for one in found]
        reads = [100 * math.expm1(one.ratio) for one in found]
        half = 100 * max(one.half_width for one in found)
        print(
            f"| {100 * slower:g} % | {100 * truly[slower]:.2f} % | {min(reads):+.2f} to {max(reads):+.2f} % "
            f"| {half:.2f} % | {_times(incumbent)} | {_times(stored)} |"
        )


def _times(verdicts: list[Any]) -> str:
    return ", ".join(f"{verdicts.count(one)} {one}" for one in sorted(set(verdicts)))


def _span(function: Callable[..., Any], x: torch.Tensor, device: torch.device, seconds: float) -> None:
    found = activities(lambda: function(x), device)
    if isinstance(found, Uncounted) or not found:
        print(f"profiler: {found.reason if isinstance(found, Uncounted) else 'nothing'}\n")
        return
    own = sum(one.seconds for one in found)
    print(f"profiler: {1e6 * own:.2f} us (warm), the graph's call {1e6 * seconds:.2f} us (cold)\n")


if __name__ == "__main__":
    main()
