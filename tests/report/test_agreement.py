"""Terminal, HTML, JSON and step summary tell the same story of one run."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pytest_fusion.diagnosis.text.heat import drawing
from pytest_fusion.report import terminal
from pytest_fusion.report.ci import github
from pytest_fusion.report.html.page import render
from pytest_fusion.report.json_file import document
from pytest_fusion.report.record import TestRecord

Make = Callable[..., TestRecord]
WHY = {
    "cause": "ignores-strides",
    "evidence": ["right on a contiguous copy", "equals the reference on the storage read as contiguous"],
    "ruled_out": ["needs-alignment", "ignores-offset"],
}
WORDS = {"failed": "fail", "unknown": "unknown", "passed": "pass", "failed as expected": "xfail"}


def off(**checks: str) -> dict[str, Any]:
    """Fields of a record in which the user switched checks off."""
    entries = {n: {"verdict": "unknown", "reason": f"switched off: {why}", "cases": 0} for n, why in checks.items()}
    return {"off": dict(checks), "checks": entries}


@pytest.fixture
def records(passing: Make, failing: Make) -> list[TestRecord]:
    """One test of each outcome and more, with checks off in each of them."""
    return [
        passing(nodeid="t.py::test_pass"),
        failing(nodeid="t.py::test_fail[a <b>]", cause="ignores-strides", diagnosis=WHY, script="case.py"),
        failing(nodeid="t.py::test_fail_unexplained", cause=None, **off(repeat="atomics", vacuity="one value")),
        passing(nodeid="t.py::test_unknown", verdict="unknown", message="no GPU here", **off(repeat="atomics")),
        failing(nodeid="t.py::test_xfail", expected=True, cause="tail-mask"),
        passing(nodeid="t.py::test_off", **off(repeat="atomics", gradients="forward only, & nothing else")),
        passing(nodeid="t.py::test_thin", cases=3),
    ]


Facts = dict[str, tuple[str, str | None, dict[str, str]]]


def facts_of_json(records: list[TestRecord]) -> Facts:
    """Outcome, cause and switched-off checks by test."""
    tests = json.loads(json.dumps(document(records, {}), allow_nan=False))["tests"]
    return {
        t["nodeid"]: ("xfail" if t["expected"] and t["verdict"] == "fail" else t["verdict"], t["cause"], t["off"])
        for t in tests
    }


def facts_of_html(records: list[TestRecord]) -> tuple[Facts, dict[str, int]]:
    """The same from the page, and its totals."""
    page = render(records, {})
    found: Facts = {}
    for outcome, inside in re.findall(r'<details class="test (\w+)"(.*?)\n</details>', page, re.DOTALL):
        file, name = re.search(r"<small>(.*?)</small>(.*?)(?:<br>|</span>)", inside).groups()  # type: ignore[union-attr]
        headline = re.search(r'class="headline">(.*?)</span>', inside)
        words = headline[1].split(" · ") if headline and outcome in ("fail", "xfail") else []
        listed = re.search(r"<h2>Switched off</h2>\s*<ul>(.*?)</ul>", inside, re.DOTALL)
        switched = re.findall(r"<li><b>(.*?)</b>: (.*?)</li>", listed[1]) if listed else []
        cause = words[1] if len(words) > 1 else None
        found[html.unescape(f"{file}::{name}")] = (outcome, cause, {n: html.unescape(why) for n, why in switched})
    totals = re.findall(r'<b class="(\w+)">(\d+)</b>', page)
    return found, {key: int(count) for key, count in totals}


def facts_of_terminal(records: list[TestRecord]) -> tuple[Facts, dict[str, int]]:
    """The same from the section at -v, and its last line."""
    lines = [text for text, _ in terminal.summary(records, verbosity=1)]
    found: Facts = {}
    nodeid = ""
    for line in lines[:-1]:
        head = re.fullmatch(r"(FAIL|UNKNOWN|pass|xfail) (t\.py::.*?)(?:: (.*))?", line)
        switched = re.fullmatch(r"  (\w+) switched off: (.*)", line)
        if head:
            nodeid = head[2]
            cause = re.search(r"\(([\w-]+)\)$", head[3] or "")
            found[nodeid] = (head[1].lower(), cause[1] if cause else None, {})
        elif switched:
            found[nodeid][2][switched[1]] = switched[2]
    counted = re.findall(r"(\d+) (failed as expected|failed|unknown|passed)", lines[-1])
    return found, {WORDS[word]: int(count) for count, word in counted}


def test_every_report_tells_the_same(records: list[TestRecord]) -> None:
    """Verdicts, causes, switched-off checks with their reasons, and totals agree in JSON, page and terminal."""
    wanted = facts_of_json(records)
    counts = dict(Counter(outcome for outcome, _, _ in wanted.values()))
    page, page_totals = facts_of_html(records)
    section, section_totals = facts_of_terminal(records)

    assert len(wanted) == len(records)
    assert page == wanted
    assert page_totals == section_totals == counts
    # An expected failure is one line there, without its cause: nobody has to act on it.
    assert section == {
        name: (outcome, None if outcome == "xfail" else cause, switched)
        for name, (outcome, cause, switched) in wanted.items()
    }


def test_the_step_summary_agrees(records: list[TestRecord]) -> None:
    """Its rows have the outcomes and the causes of the failures, and name what was off."""
    rows = [row[2:-2].split(" | ") for row in github.summary(records, {}).splitlines() if row.startswith("| ")]
    told = {test.strip("`"): (outcome, known) for outcome, test, _, known in rows[1:]}
    for nodeid, (outcome, cause, switched) in facts_of_json(records).items():
        said, known = told[nodeid]
        assert said == outcome
        assert cause is None or f"cause: {cause}" in known
        assert all(f"{name} off: " in known for name in switched)


def test_what_is_off_is_seen_without_asking(records: list[TestRecord]) -> None:
    """At the default verbosity each check and reason is one line, with the number of tests that it holds for."""
    lines = [text for text, _ in terminal.summary(records)]

    assert [line for line in lines if line.startswith("switched off")] == [
        "switched off in 3 tests: repeat (atomics)",
        "switched off in 1 test: vacuity (one value)",
        "switched off in 1 test: gradients (forward only, & nothing else)",
    ]


def test_evidence_is_shown_where_there_is_some(records: list[TestRecord]) -> None:
    """What experiments say stands in page, terminal, JSON and step summary; without it there is no heading."""
    explained, unexplained = records[1], records[2]
    page, without = render([explained], {}), render([unexplained], {})
    section = "\n".join(text for text, _ in terminal.summary([explained]))

    for said in WHY["evidence"]:
        assert said in page
        assert said in section
        assert said in github.summary([explained], {})
    assert "Ruled out: needs-alignment; ignores-offset." in page
    assert "Results of experiments" not in without
    assert document([explained], {})["tests"][0]["diagnosis"] == WHY
    assert TestRecord(**document([explained], {})["tests"][0]) == explained


def test_the_map_of_the_page_is_that_of_the_json(failing: Make) -> None:
    """Both have the same cells: what is drawn is what another program reads."""
    record = failing()
    cells = document([record], {})["tests"][0]["checks"]["values"]["error_map"]["cells"]
    page = render([record], {})

    drawn = {(int(x), int(y)) for x, y in re.findall(r'<rect[^>]* x="(\d+)" y="(\d+)"', page)}

    assert drawn == {(x, y) for y, row in enumerate(cells) for x, value in enumerate(row) if value > 1}


def test_the_page_draws_what_the_terminal_writes(failing: Make) -> None:
    """A map in characters, which a narrow page would break, is left out of the page's text; the rest of it stays."""
    found = failing().checks["values"]["error_map"]
    lines = [f"    {line}" for line in drawing(found)]
    record = failing(message="\n".join(["values failed", "  where: axis 1", *lines, "  smallest case: rows=2"]))
    assert len(lines) > 1

    page = html.unescape(render([record], {}))

    assert "where: axis 1\n  smallest case: rows=2" in page
    assert not any(line in page for line in lines)
    bare = failing(message=record.message, checks={})
    assert all(line in html.unescape(render([bare], {})) for line in lines)
