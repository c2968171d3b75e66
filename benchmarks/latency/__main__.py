"""How well latencies are told on this GPU: ``python -m benchmarks.latency [--repeats N] [--device cuda:0]``.

Of a row-wise softmax and of a small relu: how far apart N medians are, what a thing against itself reads, and how often
a kernel with 1, 2, 3 and 5 % more rows is called slower, against itself in the same run and against a stored ratio.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pytest_fusion.baseline.bootstrap import Estimate, block_ratios, estimate
from pytest_fusion.baseline.history import SAME_UNIT, Level
from pytest_fusion.baseline.judge import Noise, against_incumbent, against_stored, judge
from pytest_fusion.bench.latency import against_itself, compared, timed
from pytest_fusion.bench.on_device import opened
from pytest_fusion.run.counting.model import Uncounted
from pytest_fusion.run.counting.profile import activities

# About 55 and 2.3 us on an H200; 2,000 rows let 1 % be 20 rows.
PROBLEMS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "softmax": (partial(torch.softmax, dim=-1), 8000, 4096),
    "relu": (torch.relu, 2000, 256),
}
MORE = (0.0, 0.01, 0.02, 0.03, 0.05)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency", description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda:0")
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.cuda.set_device(device)
    here = opened(device)
    print(f"{here.facts['device_name']}, torch {torch.__version__}, {given.repeats} repeats\n")
    for name, (function, rows, width) in PROBLEMS.items():

        def batch(rows: int, function: Callable[..., Any] = function, width: int = width) -> Any:
            x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
            return timed(function, {"input": x}, function(x), device, here.cache)[0]

        control = batch(rows)
        noise, _ = against_itself(control)
        medians, runs, spent = [], dict[float, list[Estimate]](), []
        for _ in range(given.repeats):
            for more in MORE:
                candidate = batch(round(rows * (1 + more)))
                begun = time.perf_counter()
                blocks = compared(candidate, control)
                spent.append(time.perf_counter() - begun)
                runs.setdefault(more, []).append(estimate(block_ratios(blocks.candidate, blocks.control)))
                if more == 0:
                    medians.append(statistics.median(value for block in blocks.candidate for value in block))
        _told(name, medians, runs, spent, noise)
        _span(function, rows, width, device, statistics.median(medians))


def _told(name: str, medians: list[float], runs: dict[float, list[Estimate]], spent: list[float], noise: Noise) -> None:
    spread = 100 * (max(medians) / min(medians) - 1)
    print(
        f"{name}: {1e6 * statistics.median(medians):.2f} us, {len(medians)} medians within {spread:.2f} %, "
        f"{statistics.median(spent):.2f} s a case (at most {max(spent):.2f}), A/A spread {100 * noise.spread:.3f} %"
        + (f", noisy: {noise.noisy}" if noise.noisy else "")
    )
    base = runs[0.0][0]
    # As of one session of this very GPU.
    known = Level(base.ratio, math.hypot(math.sqrt(2) * SAME_UNIT, base.error), SAME_UNIT, 1, known=False)
    print("| more rows | reads | half interval | incumbent | stored |\n|---|---|---|---|---|")
    for more, found in runs.items():
        beside = [judge([against_incumbent(name, one, noise)])[0].verdict for one in found]
        stored = [judge([against_stored(name, one, known, noise)])[0].verdict for one in found]
        reads = [100 * math.expm1(one.ratio) for one in found]
        half = 100 * max(one.half_width for one in found)
        print(
            f"| +{100 * more:g} % | {min(reads):+.2f} to {max(reads):+.2f} % | {half:.2f} % | {_times(beside)} "
            f"| {_times(stored)} |"
        )


def _times(verdicts: list[Any]) -> str:
    return ", ".join(f"{verdicts.count(one)} {one}" for one in sorted(set(verdicts)))


def _span(function: Callable[..., Any], rows: int, width: int, device: torch.device, seconds: float) -> None:
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    found = activities(lambda: function(x), device)
    if isinstance(found, Uncounted) or not found:
        print(f"profiler: {found.reason if isinstance(found, Uncounted) else 'nothing'}\n")
        return
    own = sum(one.seconds for one in found)
    print(f"profiler: {1e6 * own:.2f} us (warm), the graph's call {1e6 * seconds:.2f} us (cold)\n")


if __name__ == "__main__":
    main()
