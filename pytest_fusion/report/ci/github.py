"""The run as Markdown for ``$GITHUB_STEP_SUMMARY``, always below the size at which GitHub drops a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_fusion.errors import FusionError
from pytest_fusion.report import phrases
from pytest_fusion.report.bench_table import bench_notes, bench_tables
from pytest_fusion.report.case_table import Table
from pytest_fusion.report.record import TestRecord
from pytest_fusion.spec.wording import plural

# GitHub drops a whole summary above 1 MiB; other tools write into the same file.
LIMIT_BYTES = 1024 * 1024 - 16 * 1024
# Bytes for a line about what was left out.
_CUT = 200
_WHERE = "the summary may hold 1 MiB; see the HTML or JSON report."


def summary(records: Sequence[TestRecord], environment: Mapping[str, Any], *, limit_bytes: int = LIMIT_BYTES) -> str:
    """Markdown of at most ``limit_bytes`` UTF-8 bytes: failures first, then the bench, with a note if it is cut."""
    found = phrases.counts(records)
    known = [key for key in ("lane", "device_name", "torch", "triton", "python") if environment.get(key)]
    head = [
        "## pytest-fusion",
        "",
        ", ".join(f"**{found[key]:,} {word}**" for key, word in phrases.TOTALS.items() if found[key]) or "no tests",
        "",
        ", ".join(f"{key} {_text(str(environment[key]))}" for key in known),
        "",
        "| verdict | test | rests on | what to know |",
        "|---|---|---|---|",
    ]
    rows = [_row(record) for record in phrases.by_urgency(records)]
    tables = bench_tables(records)
    # Room for the lines about cut tests and cut bench rows.
    left = limit_bytes - _size(head) - _CUT * (2 if tables else 1)
    shown: list[str] = []
    for row in rows:
        left -= _size([row])
        if left < 0:
            break
        shown.append(row)
    cut = len(rows) - len(shown)
    foot = ["", f"{plural(cut, 'more test')} left out: {_WHERE}"] if cut else []
    return "\n".join([*head, *shown, *foot, *_bench(tables, bench_notes(records), max(left, 0))]) + "\n"


def append_summary(path: Path, records: Sequence[TestRecord], environment: Mapping[str, Any]) -> None:
    """Appends the summary if it still fits. Raises :class:`FusionError` if it cannot be written."""
    try:
        used = path.stat().st_size if path.exists() else 0
        text = summary(records, environment, limit_bytes=LIMIT_BYTES - used)
        if used + len(text.encode("utf-8")) > LIMIT_BYTES:
            return
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise FusionError(
            f"cannot append to the step summary {path} ({error.strerror or error}); "
            "unset GITHUB_STEP_SUMMARY to do without it"
        ) from error


def _bench(tables: Sequence[Table], notes: Sequence[str], left: int) -> list[str]:
    """The tables of the bench and its notes in at most ``left`` bytes, and a line about what is left out."""
    found: list[str] = []
    cut = 0
    for table in tables:
        names = f"| {' | '.join(map(_text, table.header))} |"
        head = ["", f"### {_text(table.title)}", "", names, f"{'|---' * len(table.header)}|"]
        for cells in table.rows:
            row = f"| {' | '.join(map(_text, cells))} |{' |' * (len(table.header) - len(cells))}"
            left -= _size([*head, row])
            if left < 0:
                cut += 1
                continue
            found += [*head, row]
            head = []
    for note in notes:
        line = f"* {_text(phrases.one_line(note))}"
        left -= _size([line]) + 1
        if left < 0:
            cut += 1
            continue
        found += [line] if found and found[-1].startswith("* ") else ["", line]
    return [*found, *(["", f"{plural(cut, 'more line')} of the bench left out: {_WHERE}"] if cut else [])]


def _row(record: TestRecord) -> str:
    cells = (
        phrases.outcome(record),
        f"`{_code(record.nodeid)}`",
        _text(", ".join(phrases.rests_on(record))),
        _to_know(record),
    )
    return f"| {' | '.join(cells)} |"


def _to_know(record: TestRecord) -> str:
    if record.verdict == "fail":
        parts = [f"**{_text(record.failed_check or '')}**"]
        if record.cause:
            parts.append(f"cause: {_text(record.cause)}")
        if phrases.evidence(record):
            parts.append(_text(phrases.one_line("; ".join(phrases.evidence(record)))))
        parts += [_text(found)] if (found := phrases.reason(record)) else []
        if record.replay:
            parts.append(f"`{_code(phrases.replay_command(record))}`")
    elif record.raised:
        return _text(phrases.one_line(record.message))
    else:
        parts = [_text(reason) for reason in phrases.thin(record)] if record.verdict == "pass" else []
        missing = phrases.not_judged(record)
        parts += [f"not judged: {_text(', '.join(missing))}"] if missing else []
    parts += [f"hazard {_text(code)}: {_text(phrases.one_line(why))}" for code, why in phrases.hazards(record).items()]
    parts += [f"{_text(name)} off: {_text(phrases.one_line(reason))}" for name, reason in record.off.items()]
    return "<br>".join(parts)


def _text(text: str) -> str:
    """Text for a table cell: no cell or line break, no Markdown or HTML."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\\", "\\\\")
    for mark in "|`*_[]#~":
        escaped = escaped.replace(mark, f"\\{mark}")
    return " ".join(escaped.split())


def _code(text: str) -> str:
    """Text between backticks in a table cell."""
    return " ".join(text.replace("`", "'").replace("|", "\\|").split())


def _size(lines: Sequence[str]) -> int:
    return sum(len(line.encode("utf-8")) + 1 for line in lines)
