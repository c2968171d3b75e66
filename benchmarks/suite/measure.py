"""One pass of one problem: every way called, compared, its memory taken, then all sampled in turn."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.suite.agreement import ROUGHLY, ROUGHLY_GRADIENTS, apart
from benchmarks.suite.compiled import OutOfTime, compiled, forget, time_limit
from benchmarks.suite.figures import Figures
from benchmarks.suite.model import COMPILE, OURS, Call, Problem, Row, Span, Way
from benchmarks.suite.passes import UPSTREAM, both, forward, upstream_of
from benchmarks.suite.timing import Ceilings, Rotation, Sampled, interleaved, once
from pytest_fusion.case.containers import map_tensors
from pytest_fusion.spec.wording import brief

# Sampling all ways of one pass, after the first tenth of a second.
BUDGET_S = 0.8
# What a way may take for its first call: torch.compile tries a matrix product in some thirty tiles.
COMPILE_S = 120.0


@dataclass(slots=True)
class Place:
    """The GPU: its cache in bytes, what a copy and a product take there, and which ways are left out."""

    device: torch.device
    cache: int
    ceilings: Ceilings
    without: tuple[str, ...] = ()
    compile_s: float = COMPILE_S
    # Seconds that the run may still take.
    left: Callable[[], float] = lambda: math.inf

    def limit(self) -> float:
        """What a way's first call may take now."""
        return max(1.0, min(self.compile_s, self.left()))


@dataclass(slots=True)
class _Ready:
    """A way that ran and agreed."""

    call: Call
    mutates: bool
    once_s: float
    plain: str


def measured(row: Row, problem: Problem, span: Span, place: Place) -> Figures:
    """Seconds and memory of each way; those that raise, disagree or take too long have words instead."""
    inputs = dict(problem.inputs)
    if span == "both":
        inputs[UPSTREAM] = upstream_of(problem.ours, inputs, problem.grads)
    ready, words, memory = _tried(problem, span, inputs, place)
    work = problem.work_of(span)
    things: dict[str, Sampled] = {}
    try:
        rotation = Rotation.of(inputs, work.bytes, place.device, place.cache)
        for name, each in ready.items():
            try:
                things[name] = rotation.batch(each.call, each.once_s, each.mutates, each.plain)
            except Exception as error:  # noqa: BLE001 -- any way may raise anything
                _freed()
                words[name] = f"it cannot be timed: {brief(error)}"
        timers = {name: thing.timer for name, thing in things.items()}
        if not things:
            return Figures(row.family, row.text, span, work, words=words, memory=memory)
        beside: dict[str, Sampled] = {"a copy": place.ceilings.copy}
        if work.flops:
            beside["a product"] = place.ceilings.matmul
        samples = interleaved({**things, **beside}, clock=time.perf_counter, budget_s=BUDGET_S)
    finally:
        things.clear()
    product = samples.get("a product")
    return Figures(
        row.family,
        row.text,
        span,
        work,
        {name: each.median for name, each in samples.items() if name in timers},
        words,
        memory,
        {name: each.spread for name, each in samples.items() if name in timers},
        timers,
        Ceilings.copied(samples["a copy"].median),
        Ceilings.multiplied(product.median) if product is not None else None,
        len(samples["a copy"].seconds),
        tuple(name for name, way in problem.ways().items() if way.part),
    )


def _tried(
    problem: Problem, span: Span, inputs: Mapping[str, Any], place: Place
) -> tuple[dict[str, _Ready], dict[str, str], dict[str, int]]:
    """Each way once for its result, again for its memory, and some times for how long it takes."""
    ready: dict[str, _Ready] = {}
    words: dict[str, str] = {}
    memory: dict[str, int] = {}
    truth: Any = None
    ways = problem.ways()
    if (compiles := problem.to_compile()) is not None:
        ways[COMPILE] = Way(compiles)
    # Ours last: where the truth does not run, the next other way is what it is compared with.
    order = sorted(ways, key=lambda name: (name != problem.truth, name == OURS))
    for name in order:
        if name in place.without and name != problem.truth:
            words[name] = "left out"
            continue
        way = ways[name]
        call = in_pass(compiled(way.call) if name == COMPILE else way.call, problem, span)
        spoils = span in way.mutates or span in problem.mutates
        limit, result = place.limit(), None
        try:
            with time_limit(limit):
                result = call(**_given(inputs, spoils))
                torch.cuda.synchronize(place.device)
            if truth is None and name != OURS and not way.part:
                truth = result
            if not way.part and (why := wrong(problem, span, inputs, result, truth)):
                words[name] = f"wrong: {why}"
                continue
            result = None
            given: dict[str, Any] = _given(inputs, spoils)
            memory[name] = peak(call, given, place.device)
            ready[name] = _Ready(call, span in way.mutates, once(call, given, place.device), way.plain)
        except OutOfTime:
            words[name] = f"no result in {limit:.0f} s"
        except ModuleNotFoundError as error:
            words[name] = f"{error.name} is not installed"
        except Exception as error:  # noqa: BLE001 -- any way may raise anything
            words[name] = brief(error)
        result, given = None, {}
        if name in words:
            _freed()
    return ready, words, memory


def in_pass(call: Call, problem: Problem, span: Span) -> Call:
    """``call`` as this pass of ``problem`` makes it."""
    return both(call, problem.grads) if span == "both" else forward(call)


def _given(inputs: Mapping[str, Any], mutates: bool) -> dict[str, Any]:
    """The inputs, or copies for a call that would spoil them for the others."""
    if not mutates:
        return dict(inputs)
    return {name: map_tensors(value, torch.Tensor.clone) for name, value in inputs.items()}


def wrong(problem: Problem, span: Span, inputs: Mapping[str, Any], result: Any, truth: Any) -> str:
    """What is wrong with a result. Gradients are compared too; where results are random, values alone are."""
    if problem.agrees is not None:
        return problem.agrees(inputs, result[0] if span == "both" else result)
    roughly = ROUGHLY_GRADIENTS if span == "both" else ROUGHLY
    return "there is nothing to compare it with" if truth is None else apart(result, truth, roughly)


def peak(call: Callable[..., Any], inputs: Mapping[str, Any], device: torch.device) -> int:
    """Bytes beyond what is there before, at most, while it runs; its results included."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call(**inputs)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _freed() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def released() -> None:
    """Between rows: nothing compiled and no memory of the row before is kept."""
    forget()
    _freed()
