"""Plots of a bench: which are drawn, where their marks stand, and what a reader without eyes gets."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pytest_fusion.report.bench_figures import figures
from pytest_fusion.report.html.bench_plots import Drawing, LogAxis, drawings, timeline
from pytest_fusion.report.html.page import render
from pytest_fusion.report.json_file import read_json, write_json
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run.measure.timing.roofline import Activity, busy
from tests.report.benched import NODEID, chain, record, rows, sweep


def drawn(*records: TestRecord) -> list[Drawing]:
    return drawings(figures(records))


class _Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def of(self, tag: str, word: str = "") -> list[dict[str, str | None]]:
        return [
            found
            for name, found in self.found
            if name == tag and (not word or word in (found.get("class") or "").split())
        ]


def test_a_page_of_a_sweep_has_every_plot(tmp_path: Path) -> None:
    """Times and rates with a mark for each case, and one call, from records that went through JSON."""
    write_json(tmp_path / "run.json", [record(sweep())], {})
    records, _ = read_json(tmp_path / "run.json")
    page = _Tags(render(records, {}))

    images = [found for found in page.of("svg") if found.get("role") == "img"]
    assert len(images) == 2
    assert len(page.of("circle", "fused")) == len(page.of("rect", "mark")) == 2 * 4
    assert len(page.of("polyline", "limit")) == 2
    assert len(page.of("i", "activity")) == 1 + 9


def test_each_plot_has_a_title_and_a_sentence_of_its_own() -> None:
    """What ``aria-labelledby`` names exists once in the page."""
    page = _Tags(render([record([*sweep(), *rows(phase="backward")])], {}))
    named = [one for found in page.of("svg") for one in (found.get("aria-labelledby") or "").split()]
    ids = [found["id"] for tag, found in page.found if tag in ("title", "desc") and found.get("id")]

    assert len(named) == 2 * 2
    assert sorted(named) == sorted(filter(None, ids))
    assert len(set(ids)) == len(ids)


def test_the_page_of_a_bench_loads_nothing_and_escapes(tmp_path: Path) -> None:
    """Names of tests, cases and kernels stay text, in attributes too."""
    evil = '"><script>alert(1)</script>'
    found = rows(f"n={evil}", fused={"timeline": (Activity(evil, evil, 0.0, 1e-3),)})
    text = render([record([*found, *rows()], f"t.py::{evil}", notes=[evil])], {})
    page = _Tags(text)

    assert page.of("script") == []
    assert not any(key in ("src", "href", "xlink:href", "srcset") for _, found in page.found for key in found)
    assert "url(" not in text
    assert "@import" not in text


def test_a_faster_kernel_stands_lower_in_time_and_higher_in_rate() -> None:
    """At every size, and larger sizes stand further right; the limit is never on the wrong side of a time."""
    (one,) = drawn(record(sweep()))
    for plot, sign in zip(one.plots, (1, -1), strict=True):
        fused, reference, limit = plot.series
        assert [series.kind for series in plot.series] == ["fused", "reference", "limit"]
        assert [point.x for point in fused.points] == sorted(point.x for point in reference.points)
        for ours, theirs, least in zip(fused.points, reference.points, limit.points, strict=True):
            assert sign * ours.y > sign * theirs.y
            assert sign * least.y > sign * ours.y
    assert "rows=256 hidden=8192 bfloat16, 8.39 MB: 4.60 us" in one.plots[0].series[0].points[0].title


def test_the_limit_of_products_is_that_of_the_matmul_ceiling() -> None:
    """Where computing takes longer than moving, the limit is the time of the operations."""
    flops = 10**12
    found = [
        row
        for n in (1, 8)
        for row in rows(f"n={n}", n * 10**6, fused_s=n * 2e-3, reference={"facts": {"work.flops": n * flops}})
    ]
    (one,) = drawn(record(found))

    limit = next(series for series in one.plots[0].series if series.kind == "limit")
    assert [point.title.rpartition(": ")[2] for point in limit.points] == ["1.25 ms", "10.0 ms"]


def test_without_ceilings_there_is_no_limit() -> None:
    """Nothing is drawn that was not measured."""
    (one,) = drawn(record(sweep(fused={"measures": None})))
    assert [series.kind for series in one.plots[0].series] == ["fused", "reference"]


@pytest.mark.parametrize("sizes", [(256,), ()])
def test_no_plot_over_a_single_size(sizes: tuple[int, ...]) -> None:
    """The call is drawn; a line through one point says nothing that the table does not."""
    found = drawn(record(sweep(sizes)))

    assert len(found) == len(sizes)
    assert all(one.plots == () and one.timeline for one in found)


def test_without_a_gpu_nothing_is_drawn() -> None:
    """No latency, no rate, no call: launches stand in the table."""
    assert drawn(record(rows(fused_s=None))) == []


def test_one_call_shows_what_ran_when_on_one_scale() -> None:
    """Gaps are as wide as their time, what overlaps stands in two lanes, and the share of busy time is said."""
    both = [("a", "kernel", 0.0, 4e-6), ("b", "kernel", 2e-6, 4e-6), ("c", "memcpy", 8e-6, 2e-6)]
    found = timeline("n=1", both, [("r", "kernel", 0.0, 20e-6)])
    assert found is not None
    ours, theirs = found.tracks

    a, b, c = ours.marks
    unit = a.wide / 4
    assert [round((mark.left - a.left) / unit, 6) for mark in (b, c, theirs.marks[0])] == [2, 8, 0]
    assert round(theirs.marks[0].wide / unit, 6) == 20
    assert theirs.marks[0].wide == pytest.approx(100)
    assert (a.lane, b.lane, c.lane, ours.lanes) == (0, 1, 0, 2)
    assert ours.head == "fused: 3 activities in 10.0 us, busy 80 %"
    assert found.kinds == ("kernel", "memcpy")
    assert c.title == "c (memcpy): 2.00 us from 8.00 us"
    assert busy(Activity(*one) for one in both) == pytest.approx(8e-6)


def test_a_call_of_very_many_launches_is_cut_with_a_word() -> None:
    """A page stays small; the sentence has the whole number."""
    found = timeline("n=1", [("k", "kernel", 0.0, 1e-6)], chain(["k"] * 5000, 1e-2))
    assert found is not None

    assert len(found.tracks[1].marks) == 600
    assert found.tracks[1].head.startswith("reference: 5,000 activities")
    assert found.tracks[1].head.endswith("the first 600 drawn")


@pytest.mark.parametrize("spans", [[], [("k", "kernel", 0.0, 0.0)], [("k", "kernel", "nan", "inf")]])
def test_a_call_without_time_is_not_drawn(spans: list[Any]) -> None:
    """Nor one whose times are no numbers: a report must not fail over a picture."""
    assert timeline("n=1", spans, []) is None


def test_tests_of_one_name_in_two_files_are_drawn_apart() -> None:
    """A name alone does not tell them."""
    other = "tests/test_other.py::test_rms_norm"
    assert len(drawn(record(sweep()), record(sweep(test=other), other))) == 2
    assert len(drawn(record(sweep(test=NODEID)))) == 1


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.1], [2.0, 700.0], [1e-7, 1e-1], [1e-30, 1e30], [999.0, 1001.0]])
def test_axes_have_a_few_ticks_within_them(values: list[float]) -> None:
    """Never none, never a crowd, in order, and all values are inside."""
    axis = LogAxis.of(values, 0.0, 100.0)
    ticks = axis.ticks(str)

    assert 2 <= len(ticks) <= 10
    assert [tick.at for tick in ticks] == sorted(tick.at for tick in ticks)
    assert all(0 <= place <= 100 for place in [*(tick.at for tick in ticks), *map(axis.at, values)])
