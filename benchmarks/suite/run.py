"""Row after row within a budget: figures, bars, lines as they come, and a file that is whole after every row."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite.figures import Figures, Judged, difference, judged
from benchmarks.suite.measure import Place, measured, released
from benchmarks.suite.model import OURS, Problem, Row, Span, Work
from benchmarks.suite.table import line
from pytest_fusion.run.process.atomic_file import replace_whole
from pytest_fusion.spec.wording import brief

SCHEMA = 1
# What a row takes at least, so that the last one does not run far over the budget.
_LEAST_S = 2.0
Measure = Callable[[Row, Problem, Span, Place], Figures]


@dataclass(slots=True)
class Budget:
    """Seconds that may still be spent, by a clock."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    _begun: float = field(init=False)

    def __post_init__(self) -> None:
        self._begun = self.clock()

    @property
    def spent(self) -> float:
        return self.clock() - self._begun

    @property
    def left(self) -> float:
        return self.seconds - self.spent


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the table."""

    figures: Figures
    bars: tuple[Judged, ...]

    def as_json(self) -> dict[str, Any]:
        bars = [
            {**asdict(each.bar), "outcome": each.outcome, "value": each.value, "why": each.why} for each in self.bars
        ]
        return {**self.figures.as_json(), "bars": bars}


def spans_of(row: Row, wanted: Sequence[Span]) -> tuple[Span, ...]:
    """The passes that are timed for the ``wanted`` ones: a backward pass is both passes less forward."""
    spans: tuple[Span, ...] = ("forward",) if not row.backward else ("forward", "both")
    if not row.backward or "both" in wanted or "backward" in wanted:
        return spans
    return ("forward",)


def entries(
    rows: Sequence[Row],
    place: Place | None,
    budget: Budget,
    *,
    wanted: Sequence[Span] = ("forward", "both", "backward"),
    measure: Measure = measured,
    device: torch.device | None = None,
) -> Iterator[Entry]:
    """The lines in order; rows that the budget does not reach, that raise, or that come after the GPU was lost, have
    words. ``measure`` times one pass."""
    lost = ""
    for row in rows:
        spans = spans_of(row, wanted)
        if lost or budget.left < _LEAST_S:
            yield from _unmeasured(row, spans, lost or "out of time", ())
            continue
        done: list[Span] = []
        try:
            torch.manual_seed(20261122)
            problem = row.make(device if place is None else place.device, **row.sizes)
            forward: Figures | None = None
            for span in spans:
                if budget.left < _LEAST_S and done:
                    raise TimeoutError("out of time")
                found = measure(row, problem, span, place)  # type: ignore[arg-type]
                done.append(span)
                yield _entry(row, found)
                if forward is not None:
                    done.append("backward")
                    yield _entry(row, difference(found, forward, problem.work_of("backward")))
                forward = found
        except Exception as error:  # noqa: BLE001 -- the next row may do better
            why = str(error) if isinstance(error, TimeoutError) else brief(error)
            lost = _lost(place, row)
            yield from _unmeasured(row, spans, why, done)
        problem = forward = None  # type: ignore[assignment]
        if place is not None and not lost:
            released()


def _entry(row: Row, figures: Figures) -> Entry:
    return Entry(figures, tuple(judged(bar, figures) for bar in row.bars if bar.span == figures.span))


def _unmeasured(row: Row, spans: Sequence[Span], why: str, done: Sequence[Span]) -> Iterator[Entry]:
    every: tuple[Span, ...] = ("forward", "both", "backward") if "both" in spans else ("forward",)
    for span in every:
        if span not in done:
            words = {OURS: why}
            yield _entry(row, Figures(row.family, row.text, span, Work(), words=words))


def _lost(place: Place | None, row: Row) -> str:
    """Why nothing after ``row`` can be measured: an illegal access ends a process's use of the GPU."""
    if place is None:
        return ""
    try:
        torch.cuda.synchronize(place.device)
    except Exception as error:  # noqa: BLE001 -- whatever a dead context raises
        return f"the GPU was lost in {row.name!r} ({brief(error)}); leave that row out with --only"
    return ""


def read(paths: Sequence[Path], rows: Sequence[Row]) -> tuple[list[Entry], list[dict[str, Any]]]:
    """The lines of several files as one table, held to the bars of ``rows``, and the environment of each file.

    Of a pass that several have, the last one counts that has a time of ours. In the order of ``rows``; what is no row
    any more comes last, without bars. Raises `ValueError` for a file that is none of ours.
    """
    found: dict[tuple[str, Span], Figures] = {}
    environments = []
    for path in paths:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            figures = [Figures.from_json(each) for each in data["rows"]]
            environments.append(data["environment"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no file of benchmarks.suite: {brief(error)}") from error
        for each in figures:
            key = (f"{each.family}: {each.text}", each.span)
            if each.ours is not None or key not in found:
                found[key] = each
    place = {row.name: (number, row) for number, row in enumerate(rows)}
    order = sorted(found, key=lambda key: place[key[0]][0] if key[0] in place else len(place))
    return [
        _entry(place[key[0]][1], found[key]) if key[0] in place else Entry(found[key], ()) for key in order
    ], environments


def write(path: Path, environment: Mapping[str, Any], found: Sequence[Entry]) -> None:
    """The whole file anew, put in place at once, so that a run that ends early leaves all rows before."""
    text = json.dumps(
        {"schema": SCHEMA, "environment": dict(environment), "rows": [each.as_json() for each in found]}, indent=1
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_whole(path, f"{text}\n".encode())


def lines(entry: Entry) -> str:
    return line(entry.figures, entry.bars)
