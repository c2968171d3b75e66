"""Right and wrong verdicts on latency: ``python -m benchmarks.judging [--runs N] [--seed S]``.

Each line is a machine and a rule; each cell the share of runs, in per cent, in which one case that became slower by
that much is called regressed, corrected for the 30 cases of a run. Under +0 % these are false alarms.
"""

from __future__ import annotations

import argparse

from benchmarks.judging.machines import MACHINES
from benchmarks.judging.rates import CASES, Rule, incumbent, rates, stored

SLOWDOWNS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.10)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judging", description=__doc__)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rules: dict[str, Rule] = {
        "incumbent": incumbent,
        "stored, 1 session of this GPU": stored(1),
        "stored, 6 sessions of this GPU": stored(6),
        "stored, 1 session of another GPU": stored(1, same_unit=False),
        "stored, 8 sessions of as many GPUs": stored(8, same_unit=False),
    }
    print(f"regressed, % of {given.runs} runs; one case of {CASES}; in brackets: called same\n")
    print("| machine | against | " + " | ".join(f"+{100 * one:g} %" for one in SLOWDOWNS) + " |")
    print("|---" * (2 + len(SLOWDOWNS)) + "|")
    for machine in MACHINES:
        for name, rule in rules.items():
            cells = []
            for slowdown in SLOWDOWNS:
                found = rates(rule, machine, slowdown, given.runs, given.seed)
                cells.append(f"{100 * found.get('regressed', 0):.1f} ({100 * found.get('same', 0):.0f})")
            print(f"| {machine.name} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
