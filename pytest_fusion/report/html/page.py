"""``--fusion-report``: the run as one self-contained HTML file, without network or script."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pytest_fusion.diagnosis.text.heat import drawing
from pytest_fusion.report import phrases
from pytest_fusion.report.bench_figures import figures
from pytest_fusion.report.bench_table import bench_notes, bench_tables
from pytest_fusion.report.canary_table import canary_rows
from pytest_fusion.report.case_table import case_tables
from pytest_fusion.report.html import bench_plots
from pytest_fusion.report.html.heat_map import heat_map
from pytest_fusion.report.json_file import plain
from pytest_fusion.report.record import TestRecord
from pytest_fusion.report.report_paths import replace_text
from pytest_fusion.spec.wording import plural

# Shown open: a reader of one failure should not have to click, a reader of fifty needs the list first.
_OPEN = 3


def render(
    records: Sequence[TestRecord],
    environment: Mapping[str, Any],
    *,
    title: str = "pytest-fusion report",
    finished: str = "",
) -> str:
    """The page as HTML. ``finished`` is the time at which the run ended, as text."""
    import jinja2

    here = resources.files("pytest_fusion.report.html")

    def text(name: str) -> str:
        return here.joinpath(name).read_text(encoding="utf-8")

    page = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(text),
    )
    # Visible in all templates: macros do not see the variables of a page.
    page.globals.update(sizes=bench_plots)
    ordered = phrases.by_urgency(records)
    failures = [record for record in ordered if phrases.outcome(record) == "fail"][:_OPEN]
    found = phrases.counts(records)
    return page.get_template("page.html.j2").render(
        title=title,
        finished=finished,
        css=text("page.css") + text("bench.css"),
        totals=[(key, found[key], word) for key, word in phrases.TOTALS.items() if found[key]],
        cases=plural(sum(record.cases for record in records), "case"),
        seconds=phrases.duration(sum(record.seconds for record in records)),
        environment=[(k.replace("_", " "), str(plain(v))) for k, v in environment.items() if v not in (None, "")],
        number=phrases.number,
        bench=bench_tables(records),
        bench_notes=bench_notes(records),
        drawings=bench_plots.drawings(figures(records)),
        canary=canary_rows(records),
        rows=[_row(record, is_open=any(record is failure for failure in failures)) for record in ordered],
    )


def write_page(path: Path, records: Sequence[TestRecord], environment: Mapping[str, Any], **more: str) -> None:
    """Replaces ``path`` with the page; ``more`` is that of :func:`render`. Raises ``FusionError``."""
    replace_text(path, render(records, environment, **more))


def _row(record: TestRecord, *, is_open: bool) -> dict[str, Any]:
    """The words and numbers that the template shows of a test."""
    file, _, name = record.nodeid.partition("::")
    share = phrases.pair_share(record)
    ratio = phrases.worst_ratio(record)
    return {
        "outcome": phrases.outcome(record),
        "file": file if name else "",
        "name": name or file,
        "cases": record.cases,
        "share": "" if share is None else phrases.percent(share),
        "ratio": "" if ratio is None else phrases.number(ratio),
        "filled": 0.0 if ratio is None else min(ratio, 1.0),
        "grade": record.grade or "",
        "grade_means": phrases.GRADES.get(record.grade or "", ""),
        "seconds": phrases.duration(record.seconds),
        "headline": _headline(record),
        "message": _message(record),
        "evidence": tuple(phrases.evidence(record)),
        "hazards": tuple(phrases.hazards(record).items()) if record.verdict != "fail" else (),
        "ruled_out": tuple(record.diagnosis.get("ruled_out", ())),
        "replay": phrases.replay_command(record),
        "script": f"python {shlex.quote(record.script)}" if record.script else "",
        "tables": case_tables(plain(record.case)) if record.case else (),
        "maps": tuple(filter(None, (heat_map(entry.get("error_map") or {}) for entry in record.checks.values()))),
        "checks": tuple(_check(name, entry) for name, entry in record.checks.items()),
        "facts": tuple(phrases.rests_on(record)),
        "warnings": tuple(phrases.thin(record)) if record.verdict == "pass" else (),
        "off": tuple(record.off.items()),
        "notes": tuple(record.notes),
        "phases": tuple((phase, phrases.duration(seconds)) for phase, seconds in record.phases.items()),
        "open": is_open,
    }


def _headline(record: TestRecord) -> str:
    """The headline of a test's closed row, unless it simply passed."""
    if record.verdict == "fail":
        return " · ".join(word for word in (record.failed_check, record.cause) if word)
    if record.verdict == "unknown":
        reasons = phrases.unknown_checks(record)
        return phrases.one_line(record.message) or ", ".join(reasons) or "no reason given"
    return "; ".join([*(f"hazard: {code}" for code in phrases.hazards(record)), *phrases.thin(record)])


def _message(record: TestRecord) -> str:
    """The finding without its map in characters: the page draws it, and it would break in a narrow window."""
    maps = [entry["error_map"] for entry in record.checks.values() if isinstance(entry.get("error_map"), Mapping)]
    drawn = {f"    {line}" for found in maps for line in drawing(found)}
    return "\n".join(line for line in record.message.strip("\n").split("\n") if line not in drawn)


def _check(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in entry.items() if key not in ("verdict", "reason", "cases", "error_map")}
    cases = entry.get("cases")
    return {
        "name": name,
        "verdict": str(entry.get("verdict", "unknown")),
        "cases": cases if isinstance(cases, int) else None,
        "reason": str(entry.get("reason") or ""),
        "evidence": json.dumps(plain(rest), indent=1, ensure_ascii=False) if rest else "",
    }
