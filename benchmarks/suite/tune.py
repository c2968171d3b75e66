"""Other tiles timed: each checked against the result of the one in use, all sampled briefly, the best ones in turn."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite.agreement import apart
from benchmarks.suite.compiled import OutOfTime, time_limit
from benchmarks.suite.measure import in_pass, released
from benchmarks.suite.model import Row, Span
from benchmarks.suite.passes import UPSTREAM, upstream_of
from benchmarks.suite.run import Budget
from benchmarks.suite.timing import Rotation, Sampled, interleaved, once
from benchmarks.suite.tunables import Knob, Tunable, chosen, taken
from pytest_fusion.run.process.atomic_file import replace_whole
from pytest_fusion.spec.wording import brief

# Those within so much of the best by a few calls are sampled in turn, at most so many.
FINALISTS, _CLOSE = 5, 1.08
_BUDGET_S, _FIRST_CALL_S = 0.6, 60.0
HEADER = "| kernel, problem | tile | us | of the tile in use | registers and spills |\n|---|---|---|---|---|"


@dataclass(frozen=True, slots=True)
class Tried:
    """A tile: seconds of a call with it, by a few calls or in turn with others, what its kernels take, or words."""

    tunable: str
    row: str
    tile: str
    seconds: float | None = None
    over_current: float | None = None
    final: bool = False
    resources: str = ""
    words: str = ""

    def line(self) -> str:
        time_us = "-" if self.seconds is None else f"{1e6 * self.seconds:.1f}"
        share = "-" if self.over_current is None else f"{self.over_current:.3f}"
        return f"| {self.tunable}, {self.row} | {self.tile} | {time_us} | {share} | {self.resources or self.words} |"


def tuned(given: argparse.Namespace) -> int:
    """The command: a table of the best tiles of each kernel at each shape, the one in use first."""
    from benchmarks.suite.ahead import compile_ahead, processes
    from benchmarks.suite.families import rows
    from pytest_fusion.bench.on_device import opened
    from pytest_fusion.run.measure.timing.alone import alone

    only = [name.strip() for name in given.only.split(",") if name.strip()]
    budget = Budget(given.seconds)
    pairs = chosen(only, rows()[0])
    count = processes() if given.ahead < 0 else given.ahead
    if count:
        arguments = ["--candidates", "--only", given.only, "--device", given.device]
        print(compile_ahead(arguments, count, budget.left / 2), flush=True)
    device = torch.device(given.device)
    cache = opened(device).cache
    print(f"\n{HEADER}", flush=True)
    found: list[Tried] = []
    with alone(device):
        for tunable, row in pairs:
            if budget.left < 2:
                found.append(Tried(tunable.name, row.name, "-", words="not measured: out of time"))
                print(found[-1].line(), flush=True)
                continue
            tried = at(tunable, row, device, cache, budget)
            found += tried
            for each in best(tried):
                print(each.line(), flush=True)
            if given.json is not None:
                write(given.json, found)
            try:
                released()
            except RuntimeError as error:  # a tile's illegal access ends this process's use of the GPU
                print(f"the GPU was lost with {tunable.name} at {row.name} ({brief(error)}); go on with --only")
                return 1
    print(f"\n{len(found)} tiles, {budget.spent:.0f} s")
    return 0


def best(tried: Sequence[Tried]) -> list[Tried]:
    """What is shown: the tile in use, then the finalists from the fastest on."""
    first, *rest = tried
    return [first, *sorted((each for each in rest if each.final), key=lambda each: each.seconds or 0.0)]


def at(tunable: Tunable, row: Row, device: torch.device, cache: int, budget: Budget) -> list[Tried]:
    """Every tile of ``tunable`` at ``row``; the first is the one in use."""
    torch.manual_seed(20261122)
    try:
        with taken(tunable.place) as knob, time_limit(max(1.0, budget.left)):
            return _at(tunable, row, device, cache, knob, budget)
    except OutOfTime:
        return [Tried(tunable.name, row.name, "-", words="not measured: out of time")]
    except Exception as error:  # noqa: BLE001 -- the next kernel may do better
        return [Tried(tunable.name, row.name, "-", words=brief(error))]


def _at(tunable: Tunable, row: Row, device: torch.device, cache: int, knob: Knob, budget: Budget) -> list[Tried]:
    call, inputs, touched = _prepared(row, device, tunable.span)
    wanted = call(**inputs)
    torch.cuda.synchronize(device)
    if knob.asked is None:
        return [Tried(tunable.name, row.name, "-", words=f"{tunable.place} was not asked for a tile")]
    current = knob.current
    reference = once(call, inputs, device)
    seconds: dict[str, float] = {}
    tiles: dict[str, Any] = {text(current): None}
    failed: list[Tried] = []
    for tile in tunable.vary(current, knob.asked):
        knob.answer = tile
        name = text(tile)
        try:
            result = call(**inputs)
            torch.cuda.synchronize(device)
            if why := apart(result, wanted):
                failed.append(Tried(tunable.name, row.name, name, words=f"wrong: {why}"))
                continue
            del result
            seconds[name] = once(call, inputs, device)
            tiles[name] = tile
        except Exception as error:  # noqa: BLE001 -- most often: out of shared memory
            failed.append(Tried(tunable.name, row.name, name, words=brief(error)))
            torch.cuda.synchronize(device)
        if budget.left < 2:
            break
    knob.answer = None
    least = min([reference, *seconds.values()])
    finalists = [name for name in sorted(seconds, key=seconds.__getitem__) if seconds[name] <= _CLOSE * least]
    names = [text(current), *finalists[:FINALISTS]]
    rotation = Rotation.of(inputs, touched, device, cache)
    things: dict[str, Sampled] = {}
    taken_up: dict[str, str] = {}
    for name in names:
        knob.answer = tiles[name]
        taken_up[name] = resources(call, inputs)
        things[name] = rotation.batch(call, seconds.get(name, reference))
    samples = interleaved(things, clock=time.perf_counter, budget_s=_BUDGET_S)
    base = samples[names[0]].median
    final = [
        Tried(tunable.name, row.name, name, each.median, each.median / base, True, taken_up[name])
        for name, each in samples.items()
    ]
    rest = [
        Tried(tunable.name, row.name, name, each, each / reference)
        for name, each in seconds.items()
        if name not in samples
    ]
    return [*final, *rest, *failed]


def _prepared(row: Row, device: torch.device, span: Span) -> tuple[Any, dict[str, Any], int]:
    problem = row.make(device, **row.sizes)
    inputs: dict[str, Any] = dict(problem.inputs)
    if span == "both":
        inputs[UPSTREAM] = upstream_of(problem.ours, inputs, problem.grads)
    return in_pass(problem.ours, problem, span), inputs, problem.work_of(span).bytes


def text(tile: Any) -> str:
    """A tile as it would be written: ``RowTile(rows=1, columns=8192, warps=8, loop=False)``."""
    return repr(tile)


def resources(call: Any, inputs: dict[str, Any]) -> str:
    """Registers of a thread and bytes that it spills, of each kernel of a call: ``_softmax_kernel 63``."""
    from pytest_fusion.run.compilers import specialisations

    with specialisations() as seen:
        call(**inputs)
    found = []
    for kernel in seen.values():
        spilled = 4 * int(kernel.n_spills or 0)
        found.append(f"{kernel.metadata.name} {kernel.n_regs}" + (f" +{spilled} B" if spilled else ""))
    return ", ".join(found)


def write(path: Path, found: Sequence[Tried]) -> None:
    """All that was tried, fastest or not, as JSON; the whole file anew, put in place at once."""
    text = json.dumps({"schema": 1, "tried": [asdict(each) for each in found]}, indent=1)
    replace_whole(path, f"{text}\n".encode())


def warm_candidates(only: Sequence[str], part: int, count: int, device: torch.device) -> None:
    """Every ``count``-th tile of every kernel, launched once; what raises is left to the process that tells of it."""
    from benchmarks.suite.families import rows

    torch.set_num_threads(1)
    for tunable, row in chosen(only, rows()[0]):
        with contextlib.suppress(Exception), taken(tunable.place) as knob:
            call, inputs, _ = _prepared(row, device, tunable.span)
            call(**inputs)
            every = [] if knob.asked is None else tunable.vary(knob.current, knob.asked)
            for tile in every[part::count]:
                knob.answer = tile
                _launched(call, inputs, device)
        released()


def _launched(call: Any, inputs: dict[str, Any], device: torch.device) -> None:
    try:
        with time_limit(_FIRST_CALL_S):
            call(**inputs)
            torch.cuda.synchronize(device)
    except (Exception, OutOfTime):  # noqa: BLE001 -- as above
        return
