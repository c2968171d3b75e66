"""From pairs to a verdict: one finding for each metric, and what they say together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pytest_fusion.canary.offline.accuracy import FEWEST, MARGIN, ratios
from pytest_fusion.canary.offline.case_pairs import STANDINGS, Pair
from pytest_fusion.canary.offline.costs import latency, recompiled, spilled
from pytest_fusion.canary.offline.metric_finding import Finding, Status, Timing, times
from pytest_fusion.canary.offline.taken import Compiled, Spills
from pytest_fusion.errors import CanaryError
from pytest_fusion.spec.wording import did_you_mean

Decision = Literal["promote", "hold", "rollback", "error", "nodata"]

# What `--without` may name. Verdicts of the checks cannot be left out: without=, in the spec, is for these.
METRICS = ("error", "determinism", "refusals", "launches", "recompiles", "spills", "memory", "latency")
# Blocks of an allocator and a statistic or two of each row; what serves a model does not feel them.
_MEMORY_SHARE, _MEMORY_BYTES = 1.01, 1 << 20


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two kernels of one spec came to. ``counts`` is how many cases stand how."""

    decision: Decision
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...]
    counts: Mapping[str, int]
    incumbent: Mapping[str, Any]
    pairs: tuple[Pair, ...] = ()
    timings: tuple[Timing, ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """``{"verdict", "reasons", "metrics", "counts", "incumbent", "pairs", "latency", "notes"}``."""
        return {
            "verdict": self.decision,
            "reasons": list(self.reasons),
            "metrics": [asdict(finding) for finding in self.findings],
            "counts": dict(self.counts),
            "incumbent": dict(self.incumbent),
            "pairs": [pair.as_json() for pair in self.pairs],
            "latency": [asdict(timing) for timing in self.timings],
            "notes": list(self.notes),
        }


@dataclass(slots=True)
class Evidence:
    """All that is known when the last case has run. ``untimed`` says why there is no latency."""

    pairs: list[Pair] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    untimed: str = "nothing was timed"
    # Of the candidate and the incumbent, or why they are not known.
    compiled: tuple[Compiled, Compiled] | str = "nobody looked"
    spills: tuple[Spills, Spills] | str = "nobody looked"
    # What broke the measurement; nothing is promoted, and nobody blamed for it.
    broken: str = ""
    notes: list[str] = field(default_factory=list)


def check_without(names: Collection[str]) -> tuple[str, ...]:
    """The metrics to be left out. Raises ``CanaryError`` for one that does not exist."""
    for name in names:
        if name not in METRICS:
            raise CanaryError(f"a canary cannot leave out {name!r}{did_you_mean(name, METRICS)}")
    return tuple(names)


def without_evidence(decision: Decision, reason: str, incumbent: Mapping[str, Any]) -> Comparison:
    """What is said where no case could be compared."""
    return Comparison(decision, (reason,), (), {}, incumbent)


def conclude(seen: Evidence, incumbent: Mapping[str, Any], without: Collection[str] = ()) -> Comparison:
    """The verdict, with every reason for it. Looked for in the order rollback, error, nodata, hold, promote.

    * rollback: a case that the candidate fails and the incumbent does not, or a critical metric that is worse;
    * error: the incumbent's process or the measurement broke;
    * nodata: fewer than ``FEWEST`` cases that both pass;
    * hold: an ordinary metric is worse, or one that was asked for was not measured or is not decided;
    * promote: every metric is shown to be no worse.
    """
    counts = Counter[str](pair.standing for pair in seen.pairs)
    findings = [_verdicts(seen.pairs), *_metrics(seen)]
    findings = [_muted(finding) if finding.metric in without else finding for finding in findings]
    back = [f.words for f in findings if f.role == "critical" and f.status == "worse"]
    held = [f.words for f in findings if f.role == "ordinary" and f.status == "worse"]
    held += [f.words for f in findings if f.role != "muted" and f.status in ("nodata", "error")]
    few = _too_few(counts)
    decision: Decision
    if back:
        decision, reasons = "rollback", back
    elif seen.broken:
        decision, reasons = "error", [seen.broken]
    elif few:
        decision, reasons = "nodata", [few]
    elif held:
        decision, reasons = "hold", held
    else:
        decision, reasons = "promote", [f"no worse in {counts['passes']} cases that both pass{_known(counts)}"]
    return Comparison(
        decision,
        tuple(reasons),
        tuple(findings),
        {name: counts[name] for name in STANDINGS if counts[name]},
        incumbent,
        tuple(seen.pairs),
        tuple(seen.timings),
        tuple(seen.notes),
    )


def _muted(finding: Finding) -> Finding:
    return Finding(finding.metric, finding.status, "muted", finding.words, finding.value, finding.low, finding.high)


def _known(counts: Mapping[str, int]) -> str:
    known = counts.get("known-bad", 0)
    return f"; {known} case(s) are KNOWN_BAD: both fail them" if known else ""


def _too_few(counts: Mapping[str, int]) -> str:
    passes = counts.get("passes", 0)
    if passes >= FEWEST:
        return ""
    words = {
        "better": "the candidate alone passes",
        "known-bad": "both fail",
        "unexcused": "the candidate fails, and the incumbent could not be asked",
        "both-fail": "both fail in different ways",
        "refuses": "the candidate alone refuses",
        "accepts": "the incumbent alone refuses",
        "foreign": "could not be compared, because the two were given different inputs",
        "not-asked": "asked nothing of either",
    }
    rest = "; ".join(f"{counts[name]} {said}" for name, said in words.items() if counts.get(name))
    return f"both pass {passes} case(s), and {FEWEST} are needed" + (f" ({rest})" if rest else "")


def _verdicts(pairs: Sequence[Pair]) -> Finding:
    """The hard rule: no case may fail that does not fail today."""
    worse = [pair for pair in pairs if pair.standing == "worse"]
    better = sum(pair.standing == "better" for pair in pairs)
    known = sum(pair.standing == "known-bad" for pair in pairs)
    said = _known({"known-bad": known})
    if worse:
        first = worse[0]
        words = f"fails {len(worse)} case(s) that the incumbent does not fail, as {first.text}: {first.reason}"
        return Finding("verdicts", "worse", "critical", words + said, value=len(worse))
    alone = [pair for pair in pairs if pair.standing == "unexcused"]
    if alone:
        words = f"fails {len(alone)} case(s) of which the incumbent could not be asked, as {alone[0].text}: "
        return Finding("verdicts", "worse", "ordinary", words + alone[0].reason + said, value=len(alone))
    other = [pair for pair in pairs if pair.standing == "both-fail"]
    if other:
        words = f"both fail {len(other)} case(s), but not alike, as {other[0].text}: {other[0].reason}"
        return Finding("verdicts", "worse", "ordinary", words + said, value=len(other))
    if better:
        words = f"passes {better} case(s) that the incumbent fails, and fails none that it passes"
        return Finding("verdicts", "better", "critical", words + said, value=-better)
    passes = sum(pair.standing == "passes" for pair in pairs)
    return Finding("verdicts", "pass", "critical", f"both pass {passes} case(s)" + said, value=0)


def _metrics(seen: Evidence) -> list[Finding]:
    passes = [pair for pair in seen.pairs if pair.standing == "passes"]
    return [
        *(_error(passes), _determinism(seen.pairs), _refusals(seen.pairs), _launches(passes)),
        *(recompiled(seen.compiled), spilled(seen.spills), _memory(passes), latency(seen.timings, seen.untimed)),
    ]


def _error(pairs: Sequence[Pair]) -> Finding:
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
    change = f"the error of {worst.output} is {times(worst.mean)} the incumbent's"
    interval = f"({times(worst.low)} to {times(worst.high)} at 99 %, {worst.cases} cases)"
    status: Status = "pass"
    if worst.low > MARGIN:
        status = "worse"
    elif worst.high > MARGIN:
        words = f"{change} {interval}: more cases would decide whether it is within {times(MARGIN)}"
        return Finding("error", "nodata", "ordinary", words, worst.mean, worst.low, worst.high)
    elif max(ratio.high for ratio in found) < -MARGIN:
        status = "better"
    return Finding("error", status, "ordinary", f"{change} {interval}", worst.mean, worst.low, worst.high)


def _determinism(pairs: Sequence[Pair]) -> Finding:
    """Of outputs that may vary; where none may, it is a verdict."""
    new = [pair for pair in pairs if pair.candidate.varies and not pair.incumbent.varies and pair.standing == "passes"]
    if new:
        words = f"varies from run to run in {len(new)} case(s) where the incumbent does not, as {new[0].text}"
        return Finding("determinism", "worse", "ordinary", words, value=len(new))
    return Finding(
        "determinism", "pass", "ordinary", "varies from run to run nowhere that the incumbent does not", value=0
    )


def _refusals(pairs: Sequence[Pair]) -> Finding:
    new = [pair for pair in pairs if pair.standing == "refuses"]
    if new:
        words = f"refuses {len(new)} case(s) that the incumbent takes, as {new[0].text}: {new[0].reason}"
        return Finding("refusals", "worse", "ordinary", words, value=len(new))
    more = sum(pair.standing == "accepts" for pair in pairs)
    if more:
        return Finding(
            "refusals", "better", "ordinary", f"takes {more} case(s) that the incumbent refuses", value=-more
        )
    return Finding("refusals", "pass", "ordinary", "refuses nothing that the incumbent takes", value=0)


def _launches(pairs: Sequence[Pair]) -> Finding:
    known = [(pair, pair.launches) for pair in pairs if pair.launches is not None]
    if not known:
        return Finding("launches", "nodata", "critical", "launches were counted of no case in both")
    more = [(pair, ours - theirs) for pair, (ours, theirs) in known if ours > theirs]
    if more:
        pair, by = max(more, key=lambda one: one[1])
        assert pair.launches is not None
        words = f"launches {pair.launches[0]} kernels where the incumbent launches {pair.launches[1]}, as {pair.text}"
        words += f" ({pair.more})" if pair.more else ""
        words += f"; more in {len(more)} of {len(known)} case(s) counted"
        return Finding("launches", "worse", "critical", words, value=by)
    fewer = sum(ours < theirs for _, (ours, theirs) in known)
    if fewer:
        return Finding(
            "launches", "better", "critical", f"launches fewer kernels in {fewer} of {len(known)} case(s) counted"
        )
    return Finding("launches", "pass", "critical", f"as many kernels in {len(known)} case(s) counted", value=0)


def _memory(pairs: Sequence[Pair]) -> Finding:
    known = [(pair, pair.memory) for pair in pairs if pair.memory is not None]
    if not known:
        return Finding(
            "memory", "nodata", "ordinary", "peak memory was not measured: it is on a GPU, in both processes"
        )
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
