"""`conclude`: the verdict on a candidate from all compared cases, with one finding for each metric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pytest_fusion.canary.evidence.promotion_rules import Role
from pytest_fusion.canary.evidence.rollout_judge import Decision
from pytest_fusion.canary.offline import metric_finding as metric
from pytest_fusion.canary.offline.case_pairs import STANDINGS, Pair, Standing
from pytest_fusion.canary.offline.metric_finding import FEWEST, Finding, Timing
from pytest_fusion.canary.offline.taken import Compiled, Spills
from pytest_fusion.errors import CanaryError
from pytest_fusion.spec.wording import did_you_mean

# The names for `--without`. Checks cannot be left out here, but by without= in the spec.
METRICS = ("error", "determinism", "refusals", "hazards", "launches", "recompiles", "spills", "memory", "latency")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two kernels of one spec. ``counts`` has the number of cases by standing."""

    decision: Decision
    reasons: tuple[str, ...]
    incumbent: Mapping[str, Any]
    findings: tuple[Finding, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()
    timings: tuple[Timing, ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The comparison in JSON types, with the keys "verdict", "reasons", "metrics", "counts", "pairs" and others."""
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
    """All measurements after the last case. ``untimed`` is the reason for no latency."""

    pairs: list[Pair] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    untimed: str = "nothing was timed"
    # For candidate and incumbent, or the reason why they are unknown.
    compiled: tuple[Compiled, Compiled] | str = "not measured"
    spills: tuple[Spills, Spills] | str = "not measured"
    # Why the measurement failed. Then nothing is promoted, and no kernel blamed.
    broken: str = ""
    notes: list[str] = field(default_factory=list)


def check_without(names: Collection[str]) -> tuple[str, ...]:
    """The names of metrics to leave out. Raises ``CanaryError`` for an unknown one."""
    for name in names:
        if name not in METRICS:
            raise CanaryError(f"a canary cannot leave out {name!r}{did_you_mean(name, METRICS)}")
    return tuple(names)


def conclude(seen: Evidence, incumbent: Mapping[str, Any], without: Collection[str] = ()) -> Comparison:
    """The verdict with all its reasons, the first that applies of rollback, error, nodata, hold, promote.

    * rollback: a case that the candidate fails and the incumbent does not, or a critical metric that is worse;
    * error: the incumbent's process or the measurement broke;
    * nodata: fewer than ``FEWEST`` cases that both pass;
    * hold: an ordinary metric is worse, or a metric was not measured or is not decided;
    * promote: every metric is shown to be no worse.
    """
    counts = Counter[str](pair.standing for pair in seen.pairs)
    passes = [pair for pair in seen.pairs if pair.standing == "passes"]
    findings = [
        _verdicts(seen.pairs, counts),
        metric.errors(passes),
        metric.determinism(seen.pairs),
        metric.refusals(seen.pairs),
        metric.hazards(seen.pairs),
        metric.launches(passes),
        metric.recompiled(seen.compiled),
        metric.spilled(seen.spills),
        metric.memory(passes),
        metric.latency(seen.timings, seen.untimed),
    ]
    findings = [replace(finding, role="muted") if finding.metric in without else finding for finding in findings]
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
    listed: dict[str, int] = {name: counts[name] for name in STANDINGS if counts[name]}
    lists = tuple(seen.pairs), tuple(seen.timings), tuple(seen.notes)
    return Comparison(decision, tuple(reasons), incumbent, tuple(findings), listed, *lists)


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
        "unexcused": "the candidate fails, and the incumbent could not be judged",
        "both-fail": "both fail in different ways",
        "refuses": "the candidate alone refuses",
        "accepts": "the incumbent alone refuses",
        "foreign": "could not be compared, because the two got different inputs",
        "not-asked": "could not be judged",
    }
    rest = "; ".join(f"{counts[name]} {text}" for name, text in words.items() if counts.get(name))
    return f"both pass {passes} case(s), and {FEWEST} are needed" + (f" ({rest})" if rest else "")


def _verdicts(pairs: Sequence[Pair], counts: Mapping[str, int]) -> Finding:
    """The finding on the checks: no case may fail that the incumbent does not fail."""
    also = _known(counts)
    failures: tuple[tuple[Standing, Role, str], ...] = (
        ("worse", "critical", "fails {} case(s) that the incumbent does not fail"),
        ("unexcused", "ordinary", "fails {} case(s) for which the incumbent could not be judged"),
        ("both-fail", "ordinary", "both fail {} case(s), but not alike"),
    )
    for standing, role, text in failures:
        first = next((pair for pair in pairs if pair.standing == standing), None)
        if first is not None:
            words = f"{text.format(counts[standing])}, as {first.text}: {first.reason}{also}"
            return Finding("verdicts", "worse", role, words, value=counts[standing])
    better = counts["better"]
    if better:
        words = f"passes {better} case(s) that the incumbent fails, and fails none that it passes"
        return Finding("verdicts", "better", "critical", words + also, value=-better)
    return Finding("verdicts", "pass", "critical", f"both pass {counts['passes']} case(s)" + also, value=0)
