"""``python -m benchmarks.tolerance TRIALS SEED``: prints the table of false alarms and detections."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable

import torch

from benchmarks.tolerance.problems import FAMILIES
from benchmarks.tolerance.score import COLUMNS, Outcome, Score, run


def _line(score: Score, label: str, keep: Callable[[Outcome], bool], digits: int) -> str:
    rates = [score.rate(rule, keep) for rule in COLUMNS]
    cells = " | ".join("-" if math.isnan(rate) else f"{100 * rate:.{digits}f}" for rate, _ in rates)
    return f"| {label} ({rates[0][1]}) | {cells} |"


def table(score: Score) -> str:
    """The score as a Markdown table, in per cent."""
    lines = [f"| % of (kernels) | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]

    def right(outcome: Outcome) -> bool:
        return outcome[2] == "right"

    def wrong(outcome: Outcome) -> bool:
        return outcome[2] == "wrong"

    lines.append(_line(score, "**false alarms**", right, 2))
    for dtype in ("float32", "float16", "bfloat16"):
        lines.append(_line(score, f"- {dtype}", lambda o, d=dtype: right(o) and o[1] == d, 2))  # type: ignore[misc]
    for family in FAMILIES:
        lines.append(_line(score, f"- {family}", lambda o, f=family: right(o) and o[0] == f, 2))  # type: ignore[misc]
    lines.append(_line(score, "**detection**", wrong, 1))
    for dtype in ("float32", "float16", "bfloat16"):
        lines.append(_line(score, f"- {dtype}", lambda o, d=dtype: wrong(o) and o[1] == d, 1))  # type: ignore[misc]
    bugs = sorted({o[3] for o in score.seen if o[2] == "wrong"})
    for bug in bugs:
        lines.append(_line(score, f"- {bug}", lambda o, b=bug: wrong(o) and o[3] == b, 1))  # type: ignore[misc]
    lines.append(_line(score, "refused, not observable", lambda o: o[2] == "harmless", 1))
    return "\n".join(lines)


def main(trials: int, seed: int) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    started = time.perf_counter()
    score = run(trials, seed)
    print(table(score))
    print(f"\n{trials} trials x {len(FAMILIES)} families x 3 dtypes, seed {seed}, {time.perf_counter() - started:.0f} s")
    for alarm in score.alarms:
        print("alarm:", alarm)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
