"""How rollouts end: ``python -m benchmarks.canary [--runs N] [--seed S] [--most COMPARISONS]``.

Each line is a candidate; the shares of simulated rollouts, in per cent, that are promoted, sent back, or still held
after so many comparisons; then the comparisons until the end, as median and 95th percentile of those that ended.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

from benchmarks.canary.rollouts import BAD, EQUAL, End, rollout

# Comparisons of the shadow stage, in which no caller is given what the candidate computed.
SHADOW = 30_000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.canary", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=200_000)
    given = parser.parse_args()
    print("| candidate | runs | promoted | sent back | error | held | promoted after | sent back after | in shadow |")
    print("|---" * 9 + "|")
    for candidate in (EQUAL, *BAD):
        ends = [rollout(candidate, given.seed + run, given.most) for run in range(given.runs)]
        print(f"| {candidate.name} | {given.runs} | {line(ends)} |", flush=True)


def line(ends: Sequence[End]) -> str:
    """The cells of one candidate."""
    found = Counter(end.decision for end in ends)
    back = [end.comparisons for end in ends if end.decision == "rollback"]
    shares = [100 * found[name] / len(ends) for name in ("promote", "rollback", "error")]
    held = 100 - sum(shares)
    return " | ".join(
        [
            *(f"{share:.1f}" for share in (*shares, held)),
            _spread([end.comparisons for end in ends if end.decision == "promote"]),
            _spread(back),
            f"{100 * sum(one <= SHADOW for one in back) / len(ends):.1f}",
        ]
    )


def _spread(comparisons: list[int]) -> str:
    if not comparisons:
        return "-"
    ordered = sorted(comparisons)
    return f"{ordered[len(ordered) // 2]:,}, {ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]:,}"


if __name__ == "__main__":
    main()
