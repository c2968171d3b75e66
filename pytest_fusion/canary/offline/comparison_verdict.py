"""From pairs to a verdict: one finding for each metric, and what they say together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pytest_fusion.canary.offline import metric_finding as metric
from pytest_fusion.canary.offline.accuracy import FEWEST
from pytest_fusion.canary.offline.case_pairs import STANDINGS, Pair
from pytest_fusion.canary.offline.metric_finding import Finding, Timing
from pytest_fusion.canary.offline.taken import Compiled, Spills
from pytest_fusion.errors import CanaryError
from pytest_fusion.spec.wording import did_you_mean

Decision = Literal["promote", "hold", "rollback", "error", "nodata"]
# What decides for all of several specs: the first of these that any of them has.
DECISIONS: tuple[Decision, ...] = ("rollback", "error", "nodata", "hold", "promote")

# What `--without` may name. Verdicts of the checks cannot be left out: without=, in the spec, is for these.
METRICS = ("error", "determinism", "refusals", "launches", "recompiles", "spills", "memory", "latency")


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
        metric.errors(passes),
        metric.determinism(seen.pairs),
        metric.refusals(seen.pairs),
        metric.launches(passes),
        metric.recompiled(seen.compiled),
        metric.spilled(seen.spills),
        metric.memory(passes),
        metric.latency(seen.timings, seen.untimed),
    ]
