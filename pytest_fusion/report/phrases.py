"""The words and numbers of a record that terminal, HTML and CI summaries share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pytest_fusion.checks.verdict import NOT_WANTED
from pytest_fusion.report.record import TestRecord
from pytest_fusion.spec.wording import plural

# Below these a pass is reported as thin. Two interacting choices trigger most of the faults that one alone does not
# (Kuhn, Wallace, Gallo, IEEE TSE 30(6), 2004), so a pair of choices that never met may hide a bug.
FEW_CASES = 20
LITTLE_COVERED = 0.8
MANY_REJECTED = 0.5

GRADES = {
    "A": "as accurate as float32 arithmetic with one rounding",
    "B": "no worse than the reference as written",
    "C": "worse than the reference, and within the fence of eager PyTorch in this dtype",
    "D": "wrong: beyond the fence of eager PyTorch in this dtype",
}
# The names of outcomes in a total.
TOTALS = {
    "fail": "failed",
    "error": "ended in an error",
    "unknown": "unknown",
    "pass": "passed",
    "xfail": "failed as expected",
}
# Long text in one table row or terminal line hides the rows around it.
_SHORT = 200


def counts(records: Iterable[TestRecord]) -> Counter[str]:
    """The number of tests for each key of ``TOTALS``; an expected failure counts as xfail."""
    return Counter(map(outcome, records))


def outcome(record: TestRecord) -> str:
    """The verdict; ``"error"`` if the test raised one, ``"xfail"`` if ``pytest.mark.xfail`` expected either."""
    found = "error" if record.raised else record.verdict
    return "xfail" if found in ("fail", "error") and record.expected else found


def by_urgency(records: Iterable[TestRecord]) -> list[TestRecord]:
    """Failures first, then errors, unknown, thin passes and other passes, each in the order of the run."""
    rank = {"fail": 0, "error": 1, "unknown": 2, "xfail": 4, "pass": 4}
    return sorted(records, key=lambda r: 3 if r.verdict == "pass" and thin(r) else rank[outcome(r)])


def rests_on(record: TestRecord) -> list[str]:
    """The basis of a verdict, as short phrases: cases, pairs, rejected, error, grade."""
    parts = [plural(record.cases, "case")]
    share = pair_share(record)
    if share is not None:
        parts.append(f"{percent(share)} of pairs covered")
    if record.rejected:
        parts.append(f"{sum(record.rejected.values()):,} rejected ({tally(record.rejected)})")
    worst = worst_error(record)
    if worst:
        parts.append(f"worst error {worst}")
    if record.grade:
        parts.append(f"grade {record.grade}")
    return parts


def reason(record: TestRecord) -> str:
    """The finding of a failure in one line: the first one, else the reason of the check that failed."""
    entry = record.checks.get(record.failed_check or "", {})
    found = record.findings[0]["message"] if record.findings else entry.get("reason") or record.message
    return one_line(str(found))


def hazards(record: TestRecord) -> dict[str, str]:
    """The hazards that the spec of a test does not accept: code -> message."""
    found = reversed(record.findings)
    return {one["code"]: one["message"] for one in found if one["level"] == "hazard" and not one["allowed"]}


def thin(record: TestRecord) -> list[str]:
    """Why the verdict rests on little; empty where it does not.

    One concrete call (``check_equivalent``) has no coverage, and is what its caller wanted: few cases are no fault. So
    they are none of a replay, and of a profile of few cases. What a budget left out is reported as that.
    """
    if record.coverage.get("few"):
        return []
    parts = []
    share = pair_share(record)
    # Not by rejected ones: sizes that contradict their own bounds, or cost too much, never become a case.
    rejected = record.cases - record.judged
    if not record.judged:
        parts.append("no case was judged")
    elif share is not None and record.judged < FEW_CASES:
        parts.append(f"only {plural(record.judged, 'case')} judged")
    if share is not None and share < LITTLE_COVERED and "seconds" not in record.coverage:
        parts.append(f"only {percent(share)} of pairs covered")
    if rejected > MANY_REJECTED * record.cases or (parts and rejected):
        parts.append(f"{rejected:,} of {plural(record.cases, 'case')} rejected ({tally(record.rejected)})")
    return parts


def pair_share(record: TestRecord) -> float | None:
    """Share of the pairs of choices that met in a case, 0 to 1; ``None`` if there was nothing to choose."""
    share = record.coverage.get("share") if record.coverage.get("pairs") else None
    return float(share) if isinstance(share, int | float) and math.isfinite(share) else None


def worst_ratio(record: TestRecord) -> float | None:
    """Largest error over the allowed one; above 1 is a failure. May be infinite, never NaN."""
    return _ratio(_worst(record))


def _worst(record: TestRecord) -> Mapping[str, Any]:
    """The larger of ``worst``, which is of passing cases, and the failing comparison."""
    failing = record.checks.get(record.failed_check or "", {})
    return failing if (_ratio(failing) or 0.0) > (_ratio(record.worst) or 0.0) else record.worst


def _ratio(worst: Mapping[str, Any]) -> float | None:
    ratio = worst.get("ratio")
    if isinstance(ratio, str):  # plain() writes non-finite floats as text
        ratio = {"inf": math.inf, "nan": math.inf}.get(ratio)
    if not isinstance(ratio, int | float):
        return None
    return math.inf if math.isnan(ratio) else float(ratio)


def worst_error(record: TestRecord) -> str:
    """``"0.42 of allowed (output 0, rms)"``, or an empty text if no error was measured."""
    ratio = worst_ratio(record)
    if ratio is None:
        return ""
    worst = _worst(record)
    where = [str(worst[key]) for key in ("output", "statistic") if worst.get(key) not in (None, "")]
    if math.isinf(ratio):
        size = "beyond any bound"
    elif ratio > 1:
        size = f"{number(ratio)} times the allowed"
    else:
        size = f"{number(ratio)} of allowed"
    return size + (f" ({', '.join(where)})" if where else "")


def unknown_checks(record: TestRecord) -> dict[str, str]:
    """Checks without a verdict that were not switched off -> why, in the order of judging."""
    return {
        name: str(entry.get("reason") or "no reason given")
        for name, entry in record.checks.items()
        if entry.get("verdict") == "unknown" and name not in record.off
    }


def not_judged(record: TestRecord) -> dict[str, str]:
    """The unknown checks that were requested, or have something to judge, and could not run."""
    return {name: why for name, why in unknown_checks(record).items() if not why.startswith(NOT_WANTED)}


def evidence(record: TestRecord) -> list[str]:
    """The results of experiments on the failing case, as sentences."""
    return list(record.diagnosis.get("evidence", ()))


def replay_command(record: TestRecord) -> str:
    """The command that runs the failing case again; empty if no replay was written."""
    if not record.replay:
        return ""
    # Inside: it imports torch, which the controller of pytest-xdist does not need.
    from pytest_fusion.diagnosis.text import message

    return message.replay_command(record.nodeid, record.replay)


def tally(counted: Mapping[str, int]) -> str:
    """``"too-expensive 12, ValueError 3"``, most frequent first."""
    ordered = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count:,}" for name, count in ordered)


def percent(share: float) -> str:
    """Whole percent, rounded down: 99.6 % covered is not 100 %."""
    return f"{math.floor(share * 100 + 1e-9)} %"


def number(value: float) -> str:
    """Three significant digits, in full up to a million: ``0.41``, ``2,380``, ``1.2e+09``."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """``"0.4 s"``, ``"3 min 05 s"``."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def one_line(text: str, limit: int = _SHORT) -> str:
    """The first line with text, cut to ``limit`` characters."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return first if len(first) <= limit else first[: limit - 1] + "…"


def case_sentence(case: Any) -> str:
    """A case in one line: its own ``text`` if it has one, else its parts as ``key=value``."""
    if not isinstance(case, Mapping):
        return ""
    text = case.get("text")
    return one_line(text if isinstance(text, str) else ", ".join(f"{key}={value}" for key, value in case.items()))
