"""How rollouts end: ``python -m benchmarks.canary [--runs N] [--seed S] [--most N] [--jobs N] [--only TEXT]``.

The first table is of the shadow stage: the shares of simulated rollouts, in per cent, that are promoted, sent back, or
still held after so many comparisons; then the comparisons until the end, as median and 95th percentile of those that
ended. The second is of candidates that are routed without any shadow stage: calls that they were given to serve until
they were sent back, wrong results that callers got, and calls that the incumbent had to serve instead.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from benchmarks.canary.overhead import percentile
from benchmarks.canary.rollouts import BAD, EQUAL, NEARLY, POLICY, Candidate, End, served, shadowed

# Calls that are given to a routed candidate: at 1 % routing two thousand million in all.
MOST_SERVED = 20_000_000
# Runs in a piece of work for one process.
_PIECE = 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.canary", description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=300_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="rows with this text in their names")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.runs)
    with ProcessPoolExecutor(given.jobs) as pool:

        def ends(candidate: Candidate, how: Callable[[Candidate, int], End]) -> list[End]:
            return list(pool.map(partial(how, candidate), seeds, chunksize=_PIECE))

        _print("candidate", "runs", "promoted", "sent back", "error", "held", "promoted after", "sent back after")
        for candidate in (EQUAL, NEARLY, *BAD):
            if given.only not in candidate.name:
                continue
            _row(candidate.name, given.runs, *_shares(ends(candidate, partial(shadowed, most=given.most))))
        print()
        _print(
            "candidate, never in shadow", "verified", "runs", "sent back", "calls served", "wrong results", "fell back"
        )
        for candidate in BAD:
            if given.only not in candidate.name or not (candidate.wrong or candidate.raises):
                continue
            for verify in (POLICY.verify, 1.0):
                found = ends(candidate, partial(served, most=MOST_SERVED, verify=verify))
                _row(candidate.name, f"{100 * verify:g} %", given.runs, *_exposure(found))


def _print(*heads: str) -> None:
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")


def _row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def _shares(ends: Sequence[End]) -> Iterator[str]:
    found = Counter(end.decision for end in ends)
    shares = [100 * found[name] / len(ends) for name in ("promote", "rollback", "error")]
    yield from (f"{share:.2f}" for share in (*shares, 100 - sum(shares)))
    for decision in ("promote", "rollback"):
        yield _spread([end.calls for end in ends if end.decision == decision])


def _exposure(ends: Sequence[End]) -> Iterator[str]:
    back = [end for end in ends if end.decision == "rollback"]
    yield f"{100 * len(back) / len(ends):.2f}"
    yield _spread([end.calls for end in back])
    yield _spread([end.wrong for end in back])
    yield _spread([end.raised for end in back])


def _spread(numbers: list[int]) -> str:
    if not numbers:
        return "-"
    return f"{percentile(numbers, 0.5):,}, {percentile(numbers, 0.95):,}"


if __name__ == "__main__":
    main()
