"""The HTML report: one well-formed file that loads nothing and escapes everything."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from pytest_fusion.report.case_table import case_tables
from pytest_fusion.report.html.heat_map import heat_map
from pytest_fusion.report.html.page import render
from pytest_fusion.report.record import TestRecord
from pytest_fusion.report.report_paths import replace_text
from tests.report.benched import record, rows

Make = Callable[..., TestRecord]
_VOID = {"meta", "input", "br", "link", "img", "hr"}


class _Page(HTMLParser):
    """Collects text, tags and attributes, and notices a tag that is closed out of order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_the_page_is_balanced_and_loads_nothing(passing: Make, failing: Make, environment: dict[str, Any]) -> None:
    """Every tag is closed in order, and no attribute or style points outside the file."""
    text = render([passing(), failing()], environment)
    page = _Page(text)

    assert page.open == []
    assert not any(key in ("src", "href", "srcset", "action") for _, found in page.tags for key in found)
    assert "url(" not in text
    assert "@import" not in text
    assert page.of("script") == []


def test_text_of_the_run_is_escaped(failing: Make) -> None:
    """Markup in node ids, messages, cases and environment stays text."""
    evil = "<script>alert(1)</script>"
    record = failing(
        nodeid=f"t.py::test[{evil}]", message=evil, case={"drawn": evil, evil: 1}, notes=[evil], cause=evil
    )
    page = _Page(render([record], {evil: evil}, title=evil, finished=evil))

    assert page.of("script") == []
    assert sum(evil in words for words in page.words) >= 8


def test_a_failure_shows_case_map_and_replay(failing: Make, environment: dict[str, Any]) -> None:
    """The failing test is open and has its message, case, one rectangle for each wrong cell, and replay command."""
    page = _Page(render([failing()], environment))
    text = "".join(page.words)

    assert page.of("details")[0]["class"] == "test fail"
    assert "open" in page.of("details")[0]
    assert len(page.of("rect")) == 6
    assert "2 of 258 elements are wrong" in text
    assert "2 of 258 elements wrong" in text
    assert "axis 1: index 128 of 129 (the last)" in text
    assert "rows = 2, hidden = 129" in text
    assert "pytest 'tests/test_softmax.py::test_softmax[causal]' --fusion-replay .fusion/failures/causal.json" in text


def test_failures_come_first_and_only_the_first_few_are_open(passing: Make, failing: Make) -> None:
    """Fifty failures are a list to choose from, above the passes."""
    page = _Page(render([passing(), *[failing(nodeid=f"t.py::test_{index}") for index in range(50)]], {}))
    tests = [found for found in page.of("details") if "test" in str(found.get("class"))]

    assert [found["class"] for found in tests] == ["test fail"] * 50 + ["test pass"]
    assert sum("open" in found for found in tests) == 3


def test_what_failed_stands_above_the_bench_and_what_regressed_is_red(passing: Make, failing: Make) -> None:
    """Failures are what the page is opened for; the bench follows, then the tests that passed."""
    change = {"verdict": "regressed", "what": "launches.kernels 1 -> 2"}
    compared = [{"case": "rows=1", "role": "fused", "verdict": "regressed", "reason": "", "changes": [change]}]
    broken = passing(verdict="unknown", raised=True, message="the reference consumes random numbers")
    page = render([passing(), record(rows("rows=1"), compared=compared), broken, failing()], {})

    order = ('class="test fail"', 'class="test error"', 'class="bench"', 'class="test pass"')
    places = [page.index(word) for word in order]
    assert '<b class="error">1</b> ended in an error' in page
    assert places == sorted(places)
    assert '<td class="v-fail"><code>regressed</code></td>' in page
    assert '<p class="facts v-fail">test_rms_norm rows=1: regressed: launches.kernels 1 -&gt; 2</p>' in page


def test_an_empty_run_still_makes_a_page(tmp_path: Path) -> None:
    """A run interrupted before its first test leaves a page that says so."""
    replace_text(tmp_path / "fusion.html", render([], {}))

    assert "No test of this run" in (tmp_path / "fusion.html").read_text()


def test_a_case_becomes_tables_with_nothing_left_out(failing: Make) -> None:
    """Plain values share a table, and inputs get one with a column for each property."""
    plain, inputs = case_tables(failing().case or {})

    assert {row[0]: row[1] for row in plain.rows} == {
        "dims": "rows = 2, hidden = 129",
        "dtype": "float16",
        "absent": "none",
        "drawn": "scale = 0.125",
        "seed": "77",
    }
    assert inputs.header == ("", "dtype", "layout", "variant", "offset", "values")
    assert inputs.rows[0] == ("x", "float16", "padded", "0", "3", "unit")


def test_a_map_that_says_nothing_is_left_out() -> None:
    """One cell is no picture; where its axes are known in words, those stand alone."""
    assert heat_map({}) is None
    assert heat_map({"cells": [["inf"]], "axes": []}) is None
    words = heat_map({"cells": [["inf"]], "axes": ["every index"]})
    assert words is not None
    assert (words.marks, words.width, words.text) == ((), 0, "axis 0: every index")


def test_a_map_of_errors_is_drawn_on_a_logarithmic_scale() -> None:
    """Cells within the allowed error are blank, larger ones darker by their logarithm, infinite ones apart."""
    drawn = heat_map(
        {"cells": [[0.5, 2.0, 1e3], [1.0, 1e6, "inf"]], "scale": "error over allowed", "shape": [2, 30]},
    )
    assert drawn is not None
    marks = {(mark.x, mark.y): mark for mark in drawn.marks}
    assert set(marks) == {(1, 0), (2, 0), (1, 1), (2, 1)}
    assert marks[1, 0].shade < marks[2, 0].shade < marks[1, 1].shade
    assert [place for place, mark in marks.items() if mark.hard] == [(2, 1)]
    assert marks[2, 0].title == "row 0, column 20 to 29: 1,000 times the allowed error"
