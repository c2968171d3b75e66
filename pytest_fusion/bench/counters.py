"""`Counters`: hardware counts of the measured calls, from ncu in a process of its own.

No verdict and no latency uses them: ncu runs each kernel several times, from empty caches.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_fusion.bench import profiled
from pytest_fusion.bench.profiled import BEGUN, DONE, MARK, RAISED, Step
from pytest_fusion.run.measure.launches.graph_nodes import readable
from pytest_fusion.run.measure.launches.launch_count import Counts, Uncounted
from pytest_fusion.run.measure.timing.alone import alone
from pytest_fusion.run.measure.tools import ncu
from pytest_fusion.run.measure.tools.again import Again, Ended, ended, environment
from pytest_fusion.run.measure.tools.ncu import Profiled
from pytest_fusion.spec.wording import plural

# Seconds for one test: the process imports, compiles what no cache has, and runs each kernel some ten times.
_SECONDS = 600.0
_ON_A_CPU = "ncu counts on a GPU; the interpreter has no counters"
# Metrics that this machine's GPU does not have.
_lacking: set[str] = set()


@dataclass(frozen=True, slots=True)
class Counters:
    """The launches of one call in order, or the ``reason`` why not; ``unseen`` copies and fills have no counters."""

    case: str
    launches: tuple[Profiled, ...] = ()
    unseen: int = 0
    reason: str = ""

    def total(self, name: str) -> int | None:
        """The sum of a counter over all launches; ``None`` if one of them has none."""
        values = [getattr(one, name) for one in self.launches]
        return None if not values or any(value is None for value in values) else sum(values)

    def as_json(self) -> dict[str, Any]:
        known = {"case": self.case, "role": "fused", "status": "unknown" if self.reason else "counted"}
        if self.reason:
            return {**known, "reason": self.reason}
        totals = {name: self.total(name) for name in ("dram_read_bytes", "dram_written_bytes")}
        return {**known, **totals, "unseen": self.unseen, "launches": [one.as_json() for one in self.launches]}


def counted(again: Again | None, calls: Mapping[str, Counts | Uncounted], *, on_gpu: bool) -> list[Counters]:
    """The counters of each case of ``calls``, which has their launches; empty without ``again``."""
    if again is None or not calls:
        return []
    executable = ncu.find() if on_gpu else None
    if executable is None:
        return _none(calls, ncu.INSTALL if on_gpu else _ON_A_CPU)
    found = under_ncu(executable, again, list(calls))
    return [checked(one, calls[one.case]) for one in found]


def notes(found: Sequence[Counters]) -> list[str]:
    """Notes about unknown counters, one if the reason is the same for all cases, and about copies and fills."""
    reasons = {one.reason for one in found}
    if len(reasons) == 1 and "" not in reasons:
        return [f"no counters: {found[0].reason}"]
    text = [f"{one.case}: no counters: {one.reason}" for one in found if one.reason]
    return text + [
        f"{one.case}: its counters leave out its copies and fills ({one.unseen}): ncu counts kernels alone"
        for one in found
        if one.unseen
    ]


def under_ncu(executable: str, again: Again, cases: Sequence[str]) -> list[Counters]:
    """Counters of the test under ncu; it runs again without the metrics that this GPU lacks."""
    while True:
        metrics = [name for name in ncu.METRICS if name not in _lacking]
        found, absent = _one_run(executable, again, cases, metrics)
        if not absent or len(absent) == len(metrics):
            return found
        _lacking.update(absent)


def _one_run(
    executable: str, again: Again, cases: Sequence[str], metrics: Sequence[str]
) -> tuple[list[Counters], list[str]]:
    """Counters of each case; if nothing was counted also the metrics that ncu complains about."""
    with tempfile.TemporaryDirectory(prefix="fusion-counters-") as name:
        folder = Path(name)
        file, log = folder / "calls.json", folder / "ncu.csv"
        profiled.write_request(file, cases)
        command = ncu.command(executable, log, metrics, again.program(folder))
        env = environment(**{profiled.VARIABLE: str(file)})
        try:
            # ncu profiles one process at a time. Else two could wait for each other, one for ncu and one for the GPU.
            with alone("ncu"):
                end = ended(command, start=again.start, env=env, seconds=_SECONDS)
        except subprocess.TimeoutExpired:
            return _none(cases, f"ncu did not end within {_SECONDS:g} s"), []
        except OSError as error:
            return _none(cases, f"ncu could not be started: {error}"), []
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        done = profiled.steps(file)
    try:
        launches = ncu.parse(text)
    except ncu.UnreadableError as error:
        return _none(cases, f"ncu's output cannot be read: {error}"), []
    if not launches:
        output = f"{text}\n{end.output}"
        return _none(cases, _why_none(end, output, done)), ncu.lacking(output, metrics)
    return split(cases, launches, done, lost=ncu.problem(text)), []


def split(
    cases: Iterable[str], launches: Sequence[Profiled], steps: Sequence[Step], *, lost: str = ""
) -> list[Counters]:
    """The launches behind each case's mark, unknown if a mark is missing; ``lost`` is ncu's reason for an early end."""
    begun = [case for what, case, _ in steps if what == BEGUN]
    marks = [at for at, one in enumerate(launches) if MARK in one.kernel]
    if len(marks) != len(begun):
        return _none(cases, lost or f"ncu recorded {len(marks)} of {len(begun)} kernels that are known to have run")
    ends = [*marks[1:], len(launches)]
    behind = {case: launches[at + 1 : end] for case, at, end in zip(begun, marks, ends, strict=True)}
    raised = {case: words for what, case, words in steps if what == RAISED}
    done = {case for what, case, _ in steps if what == DONE}
    found: list[Counters] = []
    for case in cases:
        if case in done:
            found.append(Counters(case, launches=tuple(map(_readable, behind.get(case, ())))))
        else:
            why = "the process ended within the call" if case in behind else "it was not called"
            spoken = case not in raised and lost
            found.append(Counters(case, reason=spoken or f"under ncu {raised.get(case, why)}"))
    return found


def checked(one: Counters, counts: Counts | Uncounted) -> Counters:
    """The counters, unknown if ncu saw fewer launches than there are: their sum would look like saved traffic."""
    if one.reason:
        return one
    wanted = counts.kernels if isinstance(counts, Counts) else 1
    if len(one.launches) < wanted:
        seen = plural(len(one.launches), "kernel")
        return Counters(one.case, reason=f"ncu profiled {seen}, and the call launches {wanted}")
    return replace(one, unseen=counts.memcpy + counts.memset if isinstance(counts, Counts) else 0)


def _why_none(end: Ended, output: str, steps: Sequence[Step]) -> str:
    if problem := ncu.problem(output):
        return problem
    if raised := next((words for what, _, words in steps if what == RAISED), ""):
        return f"under ncu {raised}"
    return "ncu profiled no kernel" if steps else f"the test did not run under ncu (exit {end.code}): {end.last_line}"


def _readable(one: Profiled) -> Profiled:
    # ncu omits namespaces, except the last half of the unnamed one.
    return replace(one, kernel=readable(one.kernel).removeprefix("unnamed>::"))


def _none(cases: Iterable[str], reason: str) -> list[Counters]:
    return [Counters(case, reason=reason) for case in cases]
