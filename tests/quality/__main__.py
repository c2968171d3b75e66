"""``python -m tests.quality --seeds 0-4`` and ``--honest 10000``: the whole claims, as tables."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

from tests.quality import workers


def _table(title: tuple[str, ...], widths: tuple[int, ...], rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Prints rows as they come, so that a long run can be watched."""
    kept = []

    def line(cells: tuple[str, ...]) -> None:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip(), flush=True)

    line(title)
    for row in rows:
        line(row)
        kept.append(row)
    return kept


def _seeds(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.quality", description=__doc__)
    parser.add_argument("--seeds", type=_seeds, help="planted bugs, each with these seeds, such as 0-4")
    parser.add_argument("--honest", type=int, help="honest kernels, this many cases in all")
    parser.add_argument("--seed", type=int, default=0, help="first seed of the honest kernels")
    parser.add_argument("--as-gpu", action="store_true", help="the CPU lane with a GPU's contracted products")
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--processes", type=int, default=2, help="so many at a time")
    return parser.parse_args()


def main() -> int:
    options = _parse()
    workers.quiet()
    from tests.quality import measure
    from tests.quality.honest import HONEST, NEEDS
    from tests.quality.plants import BEYOND, PLANTS

    wrong = 0
    # Spawned, not forked: a child of a process whose torch has used its threads hangs.
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(
        options.processes, mp_context=context, initializer=workers.quiet, initargs=[options.as_gpu]
    ) as pool:
        if options.seeds is not None:
            named = [plant for plant in PLANTS if options.only in plant.name and plant.name not in BEYOND]
            plants = [plant for plant in named if not measure.lacking(plant)]
            jobs = [(plant.name, seed) for plant in plants for seed in options.seeds]
            rows: list[tuple[str, ...]] = _table(
                ("class", "plant", "seed", "caught", "check", "cause", "is", "s", "dims", "trouble"),
                (5, 40, 4, 6, 10, 26, 36, 5, 44, 0),
                pool.map(workers.plant_row, jobs),
            )
            bad = [row for row in rows if row[-1]]
            wrong += len(bad)
            wrong_ones, hazards = (sum(row[3] == level for row in rows) for level in ("wrong", "hazard"))
            classes = {plant.bug_class for plant in plants}
            print(
                f"{len(plants)} bugs of {len(classes)} classes, {len(rows)} runs: {wrong_ones} wrong, "
                f"{hazards} hazard, {len(bad)} with trouble, slowest {max(float(row[7]) for row in rows):.1f} s"
            )
            share = measure.share_of_right_causes(row[6] == "right" for row in rows)
            print(f"right cause: {share:.1%}")
            for plant in named:
                if why := measure.lacking(plant):
                    print(f"not run: {plant.bug_class} {plant.name}: {why}")
        if options.honest is not None:
            names = [
                name for name in HONEST if options.only in name and not measure.lacking_device(NEEDS.get(name, ""))
            ]
            each = -(-options.honest // len(names))
            found: list[tuple[str, ...]] = _table(
                ("kernel", "cases", "wrong", "hazard", "s", ""),
                (44, 6, 6, 6, 6, 0),
                pool.map(workers.honest_row, [(name, each, options.seed) for name in names]),
            )
            alarms, hazards = (sum(int(row[column]) for row in found) for column in (2, 3))
            wrong += alarms
            cases = sum(int(row[1]) for row in found)
            print(f"{len(names)} honest kernels, {cases} cases: {alarms} wrong, {hazards} hazards")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
