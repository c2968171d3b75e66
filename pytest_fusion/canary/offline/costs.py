"""What the candidate costs beside the incumbent: latency, recompilations, spills; a finding for each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_fusion.canary.offline.metric_finding import Finding, Status, Timing, times
from pytest_fusion.canary.offline.taken import Compiled, Spills

# Latency may be so much longer: over all calls, and in one class of shapes alone (the canary's judge has both limits).
LATENCY_MARGIN, CLASS_MARGIN = math.log(1.03), math.log(1.10)


def latency(timings: Sequence[Timing], untimed: str) -> Finding:
    """The worst size of ``bench=``; of recorded traffic the mean over its calls, and its worst class of shapes."""
    if not timings:
        return Finding("latency", "nodata", "critical", f"latency was not measured: {untimed}")
    if any(timing.share for timing in timings):
        return _weighted(timings)
    worst = _worst(timings, LATENCY_MARGIN)
    words = (
        f"{times(worst.ratio)} the incumbent's latency at {worst.text} ({times(worst.low)} to {times(worst.high)} "
        f"at 99 %), the worst of {len(timings)} size(s)"
    )
    status: Status = "pass"
    if worst.low > LATENCY_MARGIN:
        status = "worse"
    elif worst.high > LATENCY_MARGIN:
        status, words = "nodata", f"{words}: not decided whether it is within {times(LATENCY_MARGIN)}"
    elif worst.high < 0:
        status = "better"
    return Finding("latency", status, "critical", words, worst.ratio, worst.low, worst.high)


def _worst(timings: Sequence[Timing], margin: float) -> Timing:
    """The one that is most surely too slow, or else the one that may be."""
    worst = max(timings, key=lambda timing: timing.low)
    return worst if worst.low > margin else max(timings, key=lambda timing: timing.high)


def _weighted(timings: Sequence[Timing]) -> Finding:
    whole = sum(timing.share for timing in timings)
    # The ends are means of ends: wide enough also where all classes are off in one direction.
    mean, low, high = (
        sum(timing.share * value for timing, value in zip(timings, values, strict=True)) / whole
        for values in zip(*((timing.ratio, timing.low, timing.high) for timing in timings), strict=True)
    )
    worst = _worst(timings, CLASS_MARGIN)
    words = (
        f"{times(mean)} the incumbent's latency over recorded calls ({times(low)} to {times(high)} at 99 %; "
        f"{len(timings)} class(es) of shapes, {whole:.1%} of the calls); at its worst {times(worst.ratio)} at "
        f"{worst.text}, {worst.share:.1%} of the calls ({times(worst.low)} to {times(worst.high)})"
    )
    status: Status = "pass"
    if low > LATENCY_MARGIN or worst.low > CLASS_MARGIN:
        status = "worse"
    elif high > LATENCY_MARGIN or worst.high > CLASS_MARGIN:
        allowed = f"{times(LATENCY_MARGIN)} over all calls and {times(CLASS_MARGIN)} in each class"
        status, words = "nodata", f"{words}: not decided whether it is within {allowed}"
    elif high < 0:
        status = "better"
    return Finding("latency", status, "critical", words, mean, low, high)


def recompiled(seen: tuple[Compiled, Compiled] | str) -> Finding:
    """How often the same cases made Triton compile each kernel again: each time a request waits for a compiler."""
    if isinstance(seen, str):
        return Finding("recompiles", "nodata", "ordinary", f"recompilations were not counted: {seen}")
    ours, theirs = seen
    if not ours.kernels:
        return Finding("recompiles", "pass", "ordinary", "it launches no kernel of Triton's", value=0)
    words = f"compiled again {ours.again} time(s) over the sizes of the cases"
    if not theirs.kernels:
        return Finding(
            "recompiles", "pass", "ordinary", f"{words}; the incumbent has no kernel of Triton's", ours.again
        )
    words = f"{words}, the incumbent {theirs.again} time(s)"
    if ours.again > theirs.again:
        words += f": {'; '.join(ours.why)}" if ours.why else ""
        return Finding("recompiles", "worse", "ordinary", words, ours.again - theirs.again)
    status: Status = "better" if ours.again < theirs.again else "pass"
    return Finding("recompiles", status, "ordinary", words, ours.again - theirs.again)


def spilled(seen: tuple[Spills, Spills] | str) -> Finding:
    """What of a thread's values lies in memory instead of registers; registers themselves are no fault."""
    if isinstance(seen, str):
        return Finding("spills", "nodata", "ordinary", f"spills were not compared: {seen}")
    ours, theirs = seen
    for name, one in (("candidate", ours), ("incumbent", theirs)):
        if one.problem:
            words = f"spills were not compared: of the {name} they are not known: {one.problem}"
            return Finding("spills", "nodata", "ordinary", words)
    if ours.where != theirs.where:
        words = f"spills were not compared: one is known for {ours.where}, the other for {theirs.where}"
        return Finding("spills", "nodata", "ordinary", words)
    more = {text: many - theirs.bytes.get(text, 0) for text, many in ours.bytes.items()}
    text = max(more, key=lambda one: more[one], default="")
    if not text:
        return Finding("spills", "pass", "ordinary", "neither launches a kernel of Triton's", value=0)
    where = f"({ours.where}, {len(more)} size(s))"
    if more[text] > 0:
        words = (
            f"{ours.kernels[text]} spills {ours.bytes[text]} bytes a thread at {text}, and the incumbent "
            f"{theirs.bytes.get(text, 0)} {where}"
        )
        return Finding("spills", "worse", "ordinary", words, value=more[text])
    status: Status = "better" if min(more.values()) < 0 else "pass"
    return Finding("spills", status, "ordinary", f"spills no more than the incumbent {where}", value=min(more.values()))
