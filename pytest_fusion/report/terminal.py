"""The ``fusion`` section of pytest's summary, as lines with markup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pytest_fusion.checks.verdict import HAZARDS
from pytest_fusion.diagnosis.repro.replay_file import names_elsewhere
from pytest_fusion.report import phrases
from pytest_fusion.report.record import TestRecord
from pytest_fusion.spec.wording import grouped, plural

# Text and the markup of TerminalReporter.write_line(text, **markup).
Line = tuple[str, dict[str, bool]]

TITLE = "fusion"
_RED, _GREEN, _YELLOW, _BOLD = {"red": True}, {"green": True}, {"yellow": True}, {"bold": True}
_PLAIN: dict[str, bool] = {}
_COLOURS = {"pass": _GREEN, "fail": _RED, "error": _RED, "unknown": _YELLOW, "xfail": _YELLOW}


def summary(
    records: Sequence[TestRecord],
    *,
    verbosity: int = 0,
    written: Mapping[str, str] | None = None,
) -> list[Line]:
    """The section's lines, empty if there is nothing to report.

    ``verbosity`` is pytest's: below 0 only failures, 0 what needs attention, above 0 the basis of every verdict.
    ``written`` has the path of each kind of report (``"html"``).
    """
    ordered = phrases.by_urgency(records)
    if verbosity > 0:
        lines = [line for record in ordered for line in details(record)] + _reasons(records)
    else:
        lines = [line for record in ordered for line in attention(record, failures_only=verbosity < 0)]
    if verbosity == 0:
        lines += _hazards(records) + _switched_off(records) + _not_judged(records) + _cut_short(records)
    if lines and verbosity >= 0:
        lines.append(total(records))
    lines += [(f"{kind} report: {path}", _PLAIN) for kind, path in (written or {}).items()]
    return lines


def attention(record: TestRecord, *, failures_only: bool = False) -> list[Line]:
    """One test in a few lines: what failed and how to replay it, or why its verdict has a small basis."""
    found = phrases.outcome(record)
    if found in ("fail", "error"):
        return _head(record)
    if failures_only or found == "xfail":
        return []
    lines = [(f"{found} {record.nodeid}: {note}", _YELLOW) for note in record.notes if names_elsewhere(note)]
    if record.verdict == "unknown" or record.message:
        lines += _head(record)
    elif weak := phrases.thin(record):
        lines.append((f"thin pass {record.nodeid}: {'; '.join(weak)}", _YELLOW))
    return lines


def details(record: TestRecord) -> list[Line]:
    """One test at ``-v``: the basis of its verdict, what was switched off, what was not judged."""
    lines = _head(record)
    facts = [*phrases.rests_on(record), phrases.duration(record.seconds)]
    lines.append((f"  {', '.join(facts)}", _PLAIN))
    if record.verdict == "pass":
        lines += [(f"  rests on little: {reason}", _YELLOW) for reason in phrases.thin(record)]
    lines += [(f"  {name} switched off: {phrases.one_line(reason)}", _PLAIN) for name, reason in record.off.items()]
    lines += [(f"  hazard {code}: {phrases.one_line(text)}", _YELLOW) for code, text in phrases.hazards(record).items()]
    every, missing = phrases.unknown_checks(record), phrases.not_judged(record)
    unwanted = [name for name in every if name not in missing]
    if record.verdict != "fail":
        lines += [(f"  unknown: {', '.join(missing)}", _PLAIN)] if missing else []
        lines += [(f"  not requested, or nothing to judge: {', '.join(unwanted)}", _PLAIN)] if unwanted else []
    lines += [(f"  note: {phrases.one_line(note)}", _PLAIN) for note in record.notes]
    return lines


def progress(records: Iterable[TestRecord]) -> list[Line]:
    """A line for each failure, for the time until the summary: test, check, cause, what was found."""
    failed = [record for record in records if phrases.outcome(record) == "fail"]
    return [(f"{_failure(record)[0][0]}: {phrases.reason(record)}", _RED) for record in failed]


def total(records: Sequence[TestRecord]) -> Line:
    """``"3 tests: 1 failed, 2 passed; 310 cases in 8.1 s"``."""
    found = phrases.counts(records)
    parts = [f"{found[key]:,} {word}" for key, word in phrases.TOTALS.items() if found[key]]
    cases = sum(record.cases for record in records)
    seconds = sum(record.seconds for record in records)
    text = f"{plural(len(records), 'test')}: {', '.join(parts)}; {plural(cases, 'case')} in {phrases.duration(seconds)}"
    colour = _RED if found["fail"] or found["error"] else _YELLOW if found["unknown"] else _GREEN
    return text, colour | _BOLD


def _failure(record: TestRecord) -> list[Line]:
    cause = f" ({record.cause})" if record.cause else ""
    lines: list[Line] = [(f"FAIL {record.nodeid}: {record.failed_check or 'no check named'}{cause}", _RED)]
    case = phrases.case_sentence(record.case)
    if case:
        lines.append((f"  smallest case: {case}", _PLAIN))
    found = phrases.evidence(record)
    if found:
        lines.append((f"  evidence: {phrases.one_line('; '.join(found))}", _PLAIN))
    if record.replay:
        lines.append((f"  replay: {phrases.replay_command(record)}", _BOLD))
    return lines


def _head(record: TestRecord) -> list[Line]:
    """The outcome, and the reason for no verdict: the test's own message, else its first unknown check."""
    found, why = phrases.outcome(record), record.message if record.verdict == "pass" else ""
    if found == "fail":
        return _failure(record)
    if record.verdict == "unknown":
        reasons = [f"{name}: {reason}" for name, reason in phrases.unknown_checks(record).items()]
        found, why = found.upper(), record.message or next(iter(reasons), "no reason given")
    return [(f"{found} {record.nodeid}{why and f': {phrases.one_line(why)}'}", _COLOURS[found.lower()])]


def _hazards(records: Iterable[TestRecord]) -> list[Line]:
    """A line for each code of hazard; -v lists them with each test and place."""
    tests = Counter(code for record in records for code in phrases.hazards(record))
    accept = 'allow={{"{}": "why"}} accepts it'
    return [
        (f"hazard {code} in {plural(count, 'test')}: {HAZARDS[code]} (where: -v; {accept.format(code)})", _YELLOW)
        for code, count in tests.items()
    ]


def _switched_off(records: Iterable[TestRecord]) -> list[Line]:
    """The checks that users switched off, each reason once; -v lists them with each test."""
    tests = Counter((name, phrases.one_line(reason)) for record in records for name, reason in record.off.items())
    return [
        (f"switched off in {plural(count, 'test')}: {name} ({reason})", _YELLOW)
        for (name, reason), count in tests.items()
    ]


def _not_judged(records: Iterable[TestRecord]) -> list[Line]:
    """Checks that passing tests could not run, a line for each number of tests; -v has the reasons."""
    judged = [record for record in records if record.verdict == "pass" and not record.message]  # a replay has one
    tests = Counter(name for record in judged for name in phrases.not_judged(record))
    names = grouped((count, name) for name, count in tests.items())
    return [
        (f"not judged in {plural(count, 'test')} (reasons at -v): {', '.join(same)}", _YELLOW)
        for count, same in names.items()
    ]


def _cut_short(records: Iterable[TestRecord]) -> list[Line]:
    """How many passing tests their budget ended before all pairs had met; at -v each says which pairs."""
    cut = sum(record.verdict == "pass" and bool(record.coverage.get("unmet")) for record in records)
    text = f"the budget ended {plural(cut, 'test')} before all pairs of settings met (-v; all: --fusion-profile ci)"
    return [(text, _YELLOW)] if cut else []


def _reasons(records: Iterable[TestRecord]) -> list[Line]:
    """Why checks had no verdict, each reason once for all tests."""
    found = Counter(
        (name, phrases.one_line(reason))
        for record in records
        if record.verdict != "fail"
        for name, reason in phrases.unknown_checks(record).items()
    )
    return [(f"{name} unknown in {plural(n, 'test')}: {reason}", _YELLOW) for (name, reason), n in found.items()]
