"""`Finding`: the candidate beside the incumbent in one metric, for example accuracy, launches, memory or latency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from pytest_fusion.canary.evidence.promotion_rules import Role
from pytest_fusion.canary.offline.case_pairs import Pair
from pytest_fusion.canary.offline.taken import Compiled, Spills
from pytest_fusion.oracle import OutputLanes
from pytest_fusion.oracle.tolerance import excess_by
from pytest_fusion.spec.promises import Tolerance

# Results that are rounded once have 0.03 to 0.05 (float32, some 40 cases of exp). Smaller errors depend on the drawn
# values; a kernel that is exact on a few small numbers would give infinite ratios.
FLOOR = 0.05
RESAMPLES = 2000
LEVEL = 0.99
# Non-inferiority: a quarter more error is allowed (the judge of a rollout has the same limit).
MARGIN = math.log(1.25)
# With fewer cases a bootstrap has too few values to draw from.
FEWEST = 20


@dataclass(frozen=True, slots=True)
class Ratio:
    """The mean of log(candidate's error / incumbent's) over cases, ``low`` to ``high`` at ``LEVEL``."""

    output: str
    mean: float
    low: float
    high: float
    cases: int


def error(output: torch.Tensor, right: OutputLanes | torch.Tensor, tolerance: str | Tolerance) -> float | None:
    """RMS of error over allowed error; ``None`` for integers, no elements, other shapes, misplaced NaN or infinity."""
    native = right.native if isinstance(right, OutputLanes) else right
    if not output.numel() or output.shape != native.shape or not output.dtype.is_floating_point:
        return None
    shares = excess_by(output, right, tolerance)
    if not bool(shares.isfinite().all()):
        return None
    return float(shares.square().mean().sqrt())


def ratios(errors: Sequence[Mapping[str, tuple[float, float]]]) -> list[Ratio]:
    """The mean log ratio of errors (at least ``FLOOR``) for each output with ``FEWEST`` cases, and its interval: a
    bootstrap of ``RESAMPLES`` samples of cases with a fixed seed; ``LEVEL`` holds for all outputs together."""
    import numpy as np

    by_output: dict[str, list[float]] = {}
    for case in errors:
        for name, (ours, theirs) in case.items():
            by_output.setdefault(name, []).append(math.log(max(ours, FLOOR) / max(theirs, FLOOR)))
    enough = {name: values for name, values in by_output.items() if len(values) >= FEWEST}
    tail = (1 - LEVEL) / max(1, len(enough))
    found = []
    for name, values in enough.items():
        logs = np.asarray(values, dtype=np.float64)
        drawn = np.random.default_rng(0).integers(0, logs.size, (RESAMPLES, logs.size))
        low, high = np.quantile(logs[drawn].mean(axis=1), [tail, 1 - tail])
        found.append(Ratio(name, float(logs.mean()), float(low), float(high), int(logs.size)))
    return found


Status = Literal["pass", "worse", "better", "nodata", "error"]
_SIDES = ("candidate", "incumbent")
# Smaller differences are not reported: blocks of an allocator, and a statistic or two of each row.
_MEMORY_SHARE, _MEMORY_BYTES = 1.01, 1 << 20
# Latency may be longer by so much: over all calls, and in one class of shapes (the judge of a rollout has both limits).
LATENCY_MARGIN, CLASS_MARGIN = math.log(1.03), math.log(1.10)


@dataclass(frozen=True, slots=True)
class Finding:
    """The status of one metric, in words; ``value`` is a log ratio or a count, ``low`` to ``high`` its interval."""

    metric: str
    status: Status
    role: Role
    words: str
    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """log(candidate / incumbent) of the latency at one size: the median over blocks of pairs and its 99 % interval.
    ``share`` is the size's share of the recorded calls, 0 without a recording."""

    text: str
    ratio: float
    low: float
    high: float
    candidate_s: float = 0.0
    incumbent_s: float = 0.0
    share: float = 0.0


def times(log: float) -> str:
    """A log ratio as text, as in ``"1.05 x"``."""
    return f"{math.exp(log):.3g} x"


def errors(pairs: Sequence[Pair]) -> Finding:
    """The finding on accuracy: the candidate's error relative to the incumbent's."""
    measured = [pair for pair in pairs if pair.errors]
    found = ratios([pair.errors for pair in measured])
    if not found:
        reason = next((pair.unmeasured for pair in pairs if pair.unmeasured), "")
        if reason and not measured:
            return Finding("error", "nodata", "ordinary", f"errors were not compared: {reason}")
        if pairs and not measured:
            # Integers, bools, copies: a result is right or it is not, and the verdicts say which.
            return Finding("error", "pass", "ordinary", "no result has an error that could be larger or smaller")
        words = f"errors of both are known in {len(measured)} case(s), and {FEWEST} are needed"
        return Finding("error", "nodata", "ordinary", words)
    worst = max(found, key=lambda ratio: ratio.low)
    if worst.low <= MARGIN:
        worst = max(found, key=lambda ratio: ratio.high)
    words = (
        f"the error of {worst.output} is {times(worst.mean)} the incumbent's ({times(worst.low)} to "
        f"{times(worst.high)} at 99 %, {worst.cases} cases)"
    )
    status: Status = "pass"
    if worst.low > MARGIN:
        status = "worse"
    elif worst.high > MARGIN:
        status, words = "nodata", f"{words}: more cases would decide whether it is within {times(MARGIN)}"
    elif max(ratio.high for ratio in found) < -MARGIN:
        status = "better"
    return Finding("error", status, "ordinary", words, worst.mean, worst.low, worst.high)


def determinism(pairs: Sequence[Pair]) -> Finding:
    """The finding on outputs that may vary from run to run; others are judged by the checks."""
    new = [pair for pair in pairs if pair.candidate.varies and not pair.incumbent.varies and pair.standing == "passes"]
    words = "varies from run to run nowhere that the incumbent does not"
    if new:
        words = f"varies from run to run in {len(new)} case(s) where the incumbent does not, as {new[0].text}"
    return Finding("determinism", "worse" if new else "pass", "ordinary", words, value=len(new))


def refusals(pairs: Sequence[Pair]) -> Finding:
    """The finding on cases that one of the kernels refuses."""
    new = [pair for pair in pairs if pair.standing == "refuses"]
    if new:
        words = f"refuses {len(new)} case(s) that the incumbent takes, as {new[0].text}: {new[0].reason}"
        return Finding("refusals", "worse", "ordinary", words, value=len(new))
    if more := sum(pair.standing == "accepts" for pair in pairs):
        words = f"takes {more} case(s) that the incumbent refuses"
        return Finding("refusals", "better", "ordinary", words, value=-more)
    return Finding("refusals", "pass", "ordinary", "refuses nothing that the incumbent takes", value=0)


def hazards(pairs: Sequence[Pair]) -> Finding:
    """The finding on hazards of one kernel alone. New ones hold a candidate; they do not roll it back."""
    judged = [pair for pair in pairs if "rejected" not in (pair.candidate.verdict, pair.incumbent.verdict)]
    ours, theirs = ({code for pair in judged for code in getattr(pair, side).hazards} for side in _SIDES)
    if new := sorted(ours - theirs):
        first = next(pair for pair in judged if not {*new}.isdisjoint(pair.candidate.hazards))
        words = f"has hazards that the incumbent does not have: {', '.join(new)}, as {first.text}"
        return Finding("hazards", "worse", "ordinary", words, value=len(new))
    if fewer := sorted(theirs - ours):
        return Finding("hazards", "better", "ordinary", f"is without {', '.join(fewer)}", value=-len(fewer))
    return Finding("hazards", "pass", "ordinary", "has no hazard that the incumbent does not have", value=0)


def launches(pairs: Sequence[Pair]) -> Finding:
    """The finding on the number of kernels that a call launches."""
    known = [(pair, pair.launches) for pair in pairs if pair.launches is not None]
    if not known:
        return Finding("launches", "nodata", "critical", "launches could not be counted for both in any case")
    more = [(pair, ours, theirs) for pair, (ours, theirs) in known if ours > theirs]
    if more:
        pair, ours, theirs = max(more, key=lambda one: one[1] - one[2])
        words = f"launches {ours} kernels where the incumbent launches {theirs}, as {pair.text}"
        words += f" ({pair.more})" if pair.more else ""
        words += f"; more in {len(more)} of {len(known)} case(s) counted"
        return Finding("launches", "worse", "critical", words, value=ours - theirs)
    if fewer := sum(ours < theirs for _, (ours, theirs) in known):
        words = f"launches fewer kernels in {fewer} of {len(known)} case(s) counted"
        return Finding("launches", "better", "critical", words)
    return Finding("launches", "pass", "critical", f"as many kernels in {len(known)} case(s) counted", value=0)


def memory(pairs: Sequence[Pair]) -> Finding:
    """The finding on the peak of memory on a GPU."""
    known = [(pair, pair.memory) for pair in pairs if pair.memory is not None]
    if not known:
        words = "peak memory was not measured: that takes a GPU, in both processes"
        return Finding("memory", "nodata", "ordinary", words)
    more = [
        (pair, ours - theirs)
        for pair, (ours, theirs) in known
        if ours > max(_MEMORY_SHARE * theirs, theirs + _MEMORY_BYTES)
    ]
    if more:
        pair, by = max(more, key=lambda one: one[1])
        words = f"needs {by:,} bytes more at its peak, as {pair.text}; more in {len(more)} of {len(known)} case(s)"
        return Finding("memory", "worse", "ordinary", words, value=by)
    return Finding("memory", "pass", "ordinary", f"no more memory at its peak in {len(known)} case(s)", value=0)


def latency(timings: Sequence[Timing], untimed: str) -> Finding:
    """The finding on latency: at the worst size of ``bench=``, or over recorded calls and at their worst class."""
    if not timings:
        return Finding("latency", "nodata", "critical", f"latency was not measured: {untimed}")
    whole = sum(timing.share for timing in timings)
    margin = CLASS_MARGIN if whole else LATENCY_MARGIN
    # The one whose interval is above the margin by most, else the one that may be.
    worst = max(timings, key=lambda timing: timing.low)
    worst = worst if worst.low > margin else max(timings, key=lambda timing: timing.high)
    ratio, low, high, allowed = worst.ratio, worst.low, worst.high, times(LATENCY_MARGIN)
    words = (
        f"{times(ratio)} the incumbent's latency at {worst.text} ({times(low)} to {times(high)} at 99 %), the worst of "
        f"{len(timings)} size(s)"
    )
    if whole:
        # The ends are means of ends: wide enough even if all classes deviate in one direction.
        ratio, low, high = (
            sum(timing.share * getattr(timing, end) for timing in timings) / whole for end in ("ratio", "low", "high")
        )
        words = (
            f"{times(ratio)} the incumbent's latency over recorded calls ({times(low)} to {times(high)} at 99 %; "
            f"{len(timings)} class(es) of shapes, {whole:.1%} of the calls); at its worst {times(worst.ratio)} at "
            f"{worst.text}, {worst.share:.1%} of the calls ({times(worst.low)} to {times(worst.high)})"
        )
        allowed += f" over all calls and {times(CLASS_MARGIN)} in each class"
    status: Status = "pass"
    if low > LATENCY_MARGIN or worst.low > margin:
        status = "worse"
    elif high > LATENCY_MARGIN or worst.high > margin:
        status, words = "nodata", f"{words}: not decided whether it is within {allowed}"
    elif high < 0:
        status = "better"
    return Finding("latency", status, "critical", words, ratio, low, high)


def recompiled(seen: tuple[Compiled, Compiled] | str) -> Finding:
    """The finding on recompilations: how often the same cases made Triton compile a kernel again."""
    if isinstance(seen, str):
        return Finding("recompiles", "nodata", "ordinary", f"recompilations were not counted: {seen}")
    ours, theirs = seen
    if not ours.kernels:
        return Finding("recompiles", "pass", "ordinary", "it launches no Triton kernel", value=0)
    words = f"compiled again {ours.again} time(s) over the sizes of the cases"
    if not theirs.kernels:
        return Finding("recompiles", "pass", "ordinary", f"{words}; the incumbent has no Triton kernel", ours.again)
    words = f"{words}, the incumbent {theirs.again} time(s)"
    if ours.again > theirs.again:
        words += f": {'; '.join(ours.why)}" if ours.why else ""
        return Finding("recompiles", "worse", "ordinary", words, ours.again - theirs.again)
    status: Status = "better" if ours.again < theirs.again else "pass"
    return Finding("recompiles", status, "ordinary", words, ours.again - theirs.again)


def spilled(seen: tuple[Spills, Spills] | str) -> Finding:
    """The finding on spills from registers to memory; the number of registers itself does not matter."""
    if isinstance(seen, str):
        return Finding("spills", "nodata", "ordinary", f"spills were not compared: {seen}")
    ours, theirs = seen
    for name, one in (("candidate", ours), ("incumbent", theirs)):
        if one.problem:
            words = f"spills were not compared: those of the {name} are not known: {one.problem}"
            return Finding("spills", "nodata", "ordinary", words)
    if ours.where != theirs.where:
        words = (
            f"spills were not compared: the candidate's are known for {ours.where}, the incumbent's for {theirs.where}"
        )
        return Finding("spills", "nodata", "ordinary", words)
    more = {text: many - theirs.bytes.get(text, 0) for text, many in ours.bytes.items()}
    text = max(more, key=lambda one: more[one], default="")
    if not text:
        return Finding("spills", "pass", "ordinary", "neither launches a Triton kernel", value=0)
    where = f"({ours.where}, {len(more)} size(s))"
    if more[text] > 0:
        words = (
            f"{ours.kernels[text]} spills {ours.bytes[text]} bytes a thread at {text}, and the incumbent "
            f"{theirs.bytes.get(text, 0)} {where}"
        )
        return Finding("spills", "worse", "ordinary", words, value=more[text])
    status: Status = "better" if min(more.values()) < 0 else "pass"
    return Finding("spills", status, "ordinary", f"spills no more than the incumbent {where}", value=min(more.values()))
