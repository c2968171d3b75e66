"""`judge`: the verdict on a candidate from its evidence: promote, hold, rollback, error or nodata, with reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pytest_fusion.canary.evidence.evidence_counts import Cell, Evidence, Tally
from pytest_fusion.canary.evidence.promotion_rules import RULES, Metric, Role, Rules
from pytest_fusion.canary.evidence.sequential import above, below, clean_calls, in_percent, interval, mean, percent

Decision = Literal["promote", "hold", "rollback", "error", "nodata"]
# pass: shown to be good enough. open: not yet known. nodata: fewer observations than needed.
Status = Literal["pass", "better", "worse", "open", "nodata", "error"]
# A bucket whose share of observations is below this part of its share of traffic distorts the mean over all calls.
_FAIR = 0.5


@dataclass(frozen=True, slots=True)
class Finding:
    """The judgement of one metric, in one bucket or, with ``bucket=None``, over all calls. ``share`` is the bucket's
    part of the calls; ``low`` to ``high`` is the interval of the mean ``estimate``. Unknown ones are NaN."""

    metric: str
    bucket: str | None
    role: Role
    status: Status
    seen: int
    share: float
    estimate: float
    low: float
    high: float
    reason: str

    def as_json(self) -> dict[str, Any]:
        """The finding in JSON types, with ``None`` for NaN."""
        data = {name: getattr(self, name) for name in self.__slots__}
        for name in ("estimate", "low", "high"):
            data[name] = None if math.isnan(data[name]) else float(data[name])
        return data


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a rollout; ``reasons`` are the sentences of the findings that decided it."""

    rollout: str
    decision: Decision
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "rollout": self.rollout,
            "decision": self.decision,
            "reasons": list(self.reasons),
            "findings": [finding.as_json() for finding in self.findings],
        }


def judge(evidence: Evidence, rules: Rules = RULES, *, intervals: bool = True) -> Judgement:
    """The verdict on the candidate now.

    *rollback*: a critical metric is worse, over all calls or in a bucket. *error*: measurement or counts are
    unreliable. *nodata*: no calls, or most metrics have too few observations. *hold*: an ordinary metric is worse, or
    something is not yet shown. *promote*: every metric is good enough, over all calls and in each bucket of some
    traffic. ``intervals=False`` leaves out the intervals of the findings, which take most of the time and decide
    nothing.
    """
    total = sum(evidence.calls.values())
    findings = list(_findings(evidence, rules, total, intervals))
    active = [finding for finding in findings if finding.role != "muted"]
    worse = [one for one in active if one.status == "worse"]
    back = [one for one in worse if one.role == "critical"]
    wrong = [*_inconsistent(evidence, rules), *(one.reason for one in active if one.status == "error")]
    empty = [one for one in active if one.bucket is None and one.status == "nodata"]
    needed = [one for one in active if one.bucket is None or one.share >= rules.traffic]
    waiting = [*worse, *(one for one in needed if one.status in ("open", "nodata"))]
    decision: Decision
    if back:
        decision, reasons = "rollback", [one.reason for one in back]
    elif wrong:
        decision, reasons = "error", wrong
    elif not total or 2 * len(empty) > len(rules.active):
        decision, reasons = "nodata", [one.reason for one in empty] or ["no calls were counted"]
    elif waiting:
        decision, reasons = "hold", [one.reason for one in waiting]
    else:
        decision, reasons = "promote", [one.reason for one in needed if one.bucket is None]
    return Judgement(evidence.rollout, decision, tuple(reasons), tuple(findings))


def _inconsistent(evidence: Evidence, rules: Rules) -> Iterator[str]:
    known = rules.scales()
    buckets = evidence.buckets()
    if len(buckets) > rules.most_buckets:
        yield (
            f"{len(buckets)} buckets were seen, and the rules were made for {rules.most_buckets}; buckets are coarse "
            "classes of shapes: raise most_buckets before the rollout starts, or make them coarser"
        )
    for cell, tally in sorted(evidence.tallies.items()):
        if cell.metric not in known:
            yield f"{cell.metric!r} is a metric that the rules do not have; they have {', '.join(sorted(known))}"
        elif max(tally.counts, default=0) >= known[cell.metric].size:
            yield f"{cell.metric}: counts are not on its scale; were they made under other rules?"
        if cell.arm == "candidate" and tally.seen and not evidence.calls.get(cell.bucket):
            yield f"{cell.metric}: bucket {cell.bucket!r} has {tally.seen} observations and no calls; are counts lost?"


def _findings(evidence: Evidence, rules: Rules, total: int, intervals: bool) -> Iterator[Finding]:
    for metric in rules.metrics:
        pooled = evidence.pooled(metric.name)
        off_scale = any(index >= metric.scale.size for index in pooled.counts)
        distrust = "counts that are not on its scale" if off_scale else _distrusted(metric, pooled, evidence, rules)
        if distrust:
            reason = f"{metric.name}: {distrust}"
            nan = math.nan
            yield Finding(metric.name, None, metric.role, "error", pooled.seen, 1.0, nan, nan, nan, reason)
            continue
        shared = rules.back / (2 * len(rules.metrics))
        untested = _untested(metric, evidence)
        held = untested or _lopsided(metric, evidence, rules, total)
        yield _finding(metric, None, pooled, 1.0, shared, rules, intervals, held, untested)
        family = max(rules.most_buckets, len(evidence.buckets()))
        for bucket in evidence.buckets():
            share = evidence.calls.get(bucket, 0) / total if total else 0.0
            tally = evidence.tallies.get(Cell(metric.name, bucket), Tally())
            yield _finding(metric, bucket, tally, share, shared / family, rules, intervals, "", untested)


def _distrusted(metric: Metric, pooled: Tally, evidence: Evidence, rules: Rules) -> str:
    """Why the metric's observations cannot be trusted; empty if they can."""
    if pooled.broken > rules.broken * (pooled.broken + pooled.seen):
        return f"{pooled.broken} of {pooled.broken + pooled.seen} observations are NaN; is the comparison broken?"
    itself = evidence.pooled(metric.name, "itself")
    if not metric.itself or any(index >= metric.scale.size for index in itself.counts):
        return ""
    needed = math.log(2 * len(rules.metrics) / rules.wrong_machine)
    up = above(itself.counts, metric.scale, metric.itself)
    down = 0.0 if metric.is_rate else below(itself.counts, metric.scale, -metric.itself)
    if max(up, down) < needed:
        return ""
    found, allowed = _mean(metric, itself), _amount(metric, metric.itself)
    return (
        f"the incumbent beside itself has {found} in {itself.seen} observations, and {allowed} is allowed, so this "
        "measurement blames equal kernels; is the order of a pair random, the tolerance calibrated, the machine shared?"
    )


def _untested(metric: Metric, evidence: Evidence) -> str:
    seen = evidence.pooled(metric.name, "itself").seen
    if seen >= metric.fewest_itself:
        return ""
    return (
        f"{metric.name}: the incumbent beside itself was observed {seen} times, and {metric.fewest_itself} are needed "
        "to know that the measurement favours neither"
    )


def _lopsided(metric: Metric, evidence: Evidence, rules: Rules, total: int) -> str:
    """A sentence about a bucket with too few observations for its share of the calls; empty if there is none."""
    seen = evidence.pooled(metric.name).seen
    for bucket, calls in sorted(evidence.calls.items()):
        share = calls / total
        tally = evidence.tallies.get(Cell(metric.name, bucket), Tally())
        if share >= rules.traffic and tally.seen < _FAIR * share * seen:
            return (
                f"{metric.name}: bucket {bucket!r} has {100 * share:.1f} % of the calls and "
                f"{100 * tally.seen / seen:.1f} % of the observations, so their mean is not that of the traffic"
            )
    return ""


def _finding(
    metric: Metric,
    bucket: str | None,
    tally: Tally,
    share: float,
    alpha: float,
    rules: Rules,
    intervals: bool,
    held: str,
    untested: str,
) -> Finding:
    """The finding. ``held`` says why nothing is good enough yet, ``untested`` why nothing is worse."""
    limit, fewest = (metric.limit, metric.fewest) if bucket is None else (metric.bucket_limit, metric.fewest_in_bucket)
    counts, scale, seen = tally.counts, metric.scale, tally.seen
    enough = math.log(1 / rules.promoted)
    where = metric.name if bucket is None else f"{metric.name} in bucket {bucket!r}"
    estimate = mean(counts, scale)
    found = f"{where}: {_mean(metric, tally)} in {seen} observations" if seen else where
    low, high = interval(counts, scale, 2 * alpha) if intervals and seen else (math.nan, math.nan)
    status: Status
    worse = above(counts, scale, metric.acceptable) >= math.log(1 / alpha)
    if worse and untested:
        status, reason = "open", f"{found}, and {_amount(metric, metric.acceptable)} is acceptable; but {untested}"
    elif worse:
        status, reason = "worse", f"{found}, and {_amount(metric, metric.acceptable)} is acceptable"
    elif seen < fewest:
        status, reason = "nodata", f"{where}: {seen} observations, and {fewest} are needed"
    elif held:
        status, reason = "open", held
    elif below(counts, scale, limit) < enough:
        wait = "" if not metric.is_rate or counts.get(1) else f": {clean_calls(limit, rules.promoted)} without one do"
        status, reason = "open", f"{found}, not yet shown to be under {_amount(metric, limit)}{wait}"
    else:
        better = not metric.is_rate and below(counts, scale, 0.0) >= enough
        status, reason = "better" if better else "pass", f"{found}, shown to be under {_amount(metric, limit)}"
    return Finding(metric.name, bucket, metric.role, status, seen, share, estimate, low, high, reason)


def _mean(metric: Metric, tally: Tally) -> str:
    if metric.is_rate:
        return _amount(metric, mean(tally.counts, metric.scale))
    return percent(tally.counts, metric.scale)


def _amount(metric: Metric, value: float) -> str:
    return f"a rate of {value:.3g}" if metric.is_rate else in_percent(value)
