"""The run as Markdown for ``$GITHUB_STEP_SUMMARY``, never above the size at which the whole summary is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_fusion.errors import FusionError
from pytest_fusion.report.phrases import (
    by_urgency,
    counts,
    evidence,
    one_line,
    outcome,
    plural,
    replay_command,
    rests_on,
    thin,
    unknown_checks,
)
from pytest_fusion.report.record import TestRecord

# GitHub drops a step's summary whole above 1 MiB; other tools write into the same file.
LIMIT_BYTES = 1024 * 1024 - 16 * 1024
_WORDS = {"fail": "failed", "unknown": "unknown", "pass": "passed", "xfail": "failed as expected"}


def summary(records: Sequence[TestRecord], environment: Mapping[str, Any], *, limit_bytes: int = LIMIT_BYTES) -> str:
    """Markdown of at most ``limit_bytes`` UTF-8 bytes: failures first, then a table, cut with a word about the cut."""
    found = counts(records)
    head = [
        "## pytest-fusion",
        "",
        ", ".join(f"**{found[key]:,} {word}**" for key, word in _WORDS.items() if found[key]) or "no tests",
        "",
        _environment(environment),
        "",
        "| verdict | test | rests on | what to know |",
        "|---|---|---|---|",
    ]
    rows = [_row(record) for record in by_urgency(records)]
    left = limit_bytes - _size(head) - 200  # 200: the line about the cut
    kept: list[str] = []
    for row in rows:
        left -= _size([row])
        if left < 0:
            break
        kept.append(row)
    cut = len(rows) - len(kept)
    foot = ["", f"{plural(cut, 'more test')} left out: the summary may hold 1 MiB; see the HTML or JSON report."]
    return "\n".join(head + kept + (foot if cut else [])) + "\n"


def append_summary(path: Path, records: Sequence[TestRecord], environment: Mapping[str, Any]) -> None:
    """Append to the step's summary what still fits. Raises :class:`FusionError` when it cannot be written."""
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


def _row(record: TestRecord) -> str:
    cells = (outcome(record), f"`{_code(record.nodeid)}`", _text(", ".join(rests_on(record))), _to_know(record))
    return f"| {' | '.join(cells)} |"


def _to_know(record: TestRecord) -> str:
    if record.verdict == "fail":
        said = [f"**{_text(record.failed_check or '')}**"]
        if record.cause:
            said.append(f"cause: {_text(record.cause)}")
        if evidence(record):
            said.append(_text(one_line("; ".join(evidence(record)))))
        if record.message:
            said.append(_text(one_line(record.message)))
        if record.replay:
            said.append(f"`{_code(replay_command(record))}`")
        return "<br>".join([*said, *_off(record)])
    said = [_text(reason) for reason in thin(record)] if record.verdict == "pass" else []
    missing = unknown_checks(record)
    said += [f"not judged: {_text(', '.join(missing))}"] if missing else []
    return "<br>".join([*said, *_off(record)])


def _off(record: TestRecord) -> list[str]:
    return [f"{_text(name)} off: {_text(one_line(reason))}" for name, reason in record.off.items()]


def _environment(environment: Mapping[str, Any]) -> str:
    shown = ("lane", "device_name", "torch", "triton", "python")
    return ", ".join(f"{key} {_text(str(environment[key]))}" for key in shown if environment.get(key))


def _text(text: str) -> str:
    """Text for a table cell: no cell or line break, and nothing that Markdown or HTML would act on."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\\", "\\\\")
    for mark in "|`*_[]#~":
        escaped = escaped.replace(mark, f"\\{mark}")
    return " ".join(escaped.split())


def _code(text: str) -> str:
    """Text between backticks in a table cell."""
    return " ".join(text.replace("`", "'").replace("|", "\\|").split())


def _size(lines: Sequence[str]) -> int:
    return sum(len(line.encode("utf-8")) + 1 for line in lines)
