"""How much faster a whole grid at once is: `python -m benchmarks.interpreter [ROUNDS]`.

One process: first Triton's own interpreter as it ships, then the mended lane, one program after the other, in batches
without a record of accesses, and in batches as the plugin runs them. Medians; results are checked before any is timed.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"


def median(launch: Callable[[], None], rounds: int) -> float:
    """Milliseconds."""
    launch()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        launch()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def measure(cases: list[Any], rounds: int, session: Callable[[], AbstractContextManager[Any]]) -> list[float | None]:
    """The median of every case inside a session of its own; ``None`` for a case that does not run."""
    found: list[float | None] = []
    for case in cases:
        with session():
            try:
                case.launch()
            except Exception as error:  # noqa: BLE001 - Triton 3.6's own interpreter with numpy 2.4 fails at range()
                print(f"{case.name}: {type(error).__name__}: {error}", file=sys.stderr)
                found.append(None)
                continue
            case.check()
            found.append(median(case.launch, rounds))
    return found


def _times(value: float | None, by: float | None) -> str:
    return "-" if value is None or by is None else f"{value / by:.1f}x"


def _ms(value: float | None) -> str:
    return "fails" if value is None else f"{value:.1f}"


def main(rounds: int) -> None:
    """Print the table."""
    import triton

    from benchmarks.interpreter.kernels import timed

    cases = timed()
    columns: dict[str, list[float | None]] = {"upstream": measure(cases, max(rounds // 3, 2), nullcontext)}

    from pytest_fusion.interpreter import interpreted

    columns["serial"] = measure(cases, max(rounds // 3, 2), lambda: interpreted(executor="serial", checked=False))
    columns["batched"] = measure(cases, rounds, lambda: interpreted(checked=False))
    columns["checked"] = measure(cases, rounds, interpreted)
    print(f"triton {triton.__version__}, medians in ms\n")
    print("| kernel | programs | upstream | mended, serial | batched | batched, checked | speed-up | bar | checking |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row, case in enumerate(cases):
        upstream, serial, batched, checked = (columns[name][row] for name in columns)
        print(
            f"| {case.name} | {case.programs} | {_ms(upstream)} | {_ms(serial)} | {_ms(batched)} | {_ms(checked)} "
            f"| {_times(upstream, checked)} | {case.bar:.0f}x | {_times(checked, batched)} |"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
