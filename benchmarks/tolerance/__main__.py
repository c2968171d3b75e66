"""``python -m benchmarks.tolerance TRIALS SEED``: prints the table of false alarms and detections."""

from __future__ import annotations

import math
import sys
import time
import warnings

import torch

from benchmarks.tolerance.problems import FAMILIES
from benchmarks.tolerance.score import COLUMNS, DTYPES, Outcome, Score, run


def _line(score: Score, label: str, digits: int, side: str, place: int | None = None, value: str = "") -> str:
    """One row: kernels of ``side`` whose outcome has ``value`` at ``place``."""

    def keep(outcome: Outcome) -> bool:
        return outcome[2] == side and (place is None or outcome[place] == value)

    rates = [score.rate(rule, keep) for rule in COLUMNS]
    cells = " | ".join("-" if math.isnan(rate) else f"{100 * rate:.{digits}f}" for rate, _ in rates)
    return f"| {label} ({rates[0][1]}) | {cells} |"


def table(score: Score) -> str:
    """The score as a Markdown table, in per cent."""
    dtypes = [str(dtype)[6:] for dtype in DTYPES]
    bugs = sorted({outcome[3] for outcome in score.seen if outcome[2] == "wrong"})
    return "\n".join(
        [
            f"| % of (kernels) | {' | '.join(COLUMNS)} |",
            "|---" * (1 + len(COLUMNS)) + "|",
            _line(score, "**false alarms**", 2, "right"),
            *(_line(score, f"- {dtype}", 2, "right", 1, dtype) for dtype in dtypes),
            *(_line(score, f"- {family}", 2, "right", 0, family) for family in FAMILIES),
            _line(score, "refused, as eager PyTorch has it", 2, "eager"),
            _line(score, "**detection**", 1, "wrong"),
            *(_line(score, f"- {dtype}", 1, "wrong", 1, dtype) for dtype in dtypes),
            *(_line(score, f"- {bug}", 1, "wrong", 3, bug) for bug in bugs),
            _line(score, "refused, not observable", 1, "harmless"),
        ]
    )


def main(trials: int, seed: int) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    started = time.perf_counter()
    score = run(trials, seed)
    print(table(score))
    spent = time.perf_counter() - started
    print(f"\n{trials} trials x {len(FAMILIES)} families x 3 dtypes, seed {seed}, {spent:.0f} s")
    for alarm in score.alarms:
        print("alarm:", alarm)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
