"""Figures of the suite's table against bars, the backward pass as a difference, and their line in the table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.suite.figures import Figures, difference, judged
from benchmarks.suite.model import COMPILE, EAGER, LIGER, OURS, Bar, Span, Work, bars, over
from benchmarks.suite.table import HEADER, line, size, summary


def _figures(span: Span = "forward", **seconds: float) -> Figures:
    return Figures(
        "softmax",
        "8192x8192",
        span,
        Work(400, 0),
        seconds,
        {LIGER: "liger_kernel is not installed"},
        {OURS: 1 << 29},
        copy_bytes_per_s=4.0,
        matmul_flops_per_s=100.0,
    )


FOUND = _figures(ours=100.0, eager=250.0, compile=90.0, library=80.0)


@pytest.mark.parametrize(
    ("bar", "value"),
    [
        (Bar("copy", 1.0), 1.0),
        (Bar("us", 1e8), 1e8),
        (Bar("gib", 0.5), 0.5),
        (Bar(EAGER, 2.5), 2.5),
        (Bar("library", 0.8), 0.8),
        (Bar("best", 0.9), 0.9),
    ],
)
def test_a_bar_that_is_just_reached_is_met(bar: Bar, value: float) -> None:
    """Each kind of bar is taken of its own figure, and its bound belongs to what meets it."""
    found = judged(bar, FOUND)
    assert (found.outcome, found.value) == ("met", pytest.approx(value))
    harder = replace(bar, bound=0.99 * bar.bound if bar.at_most else 1.01 * bar.bound)
    assert judged(harder, FOUND).outcome == "missed"


@pytest.mark.parametrize(
    ("bar", "figures", "why"),
    [
        (Bar(LIGER, 1.0), FOUND, "liger_kernel is not installed"),
        (Bar("SDPA flash", 1.0), FOUND, "SDPA flash was not timed"),
        (Bar("tflops", 1.0), FOUND, "it has no products"),
        (Bar("matmul", 1.0), FOUND, "it has no products"),
        (Bar("copy", 0.5), replace(FOUND, copy_bytes_per_s=None), "no copy was timed beside it"),
        (Bar("gib", 0.5), replace(FOUND, memory={}), "its memory was not measured"),
        (Bar("best", 0.9), _figures(ours=1.0, library=1.0), "no rival was timed"),
        (Bar("us", 10), _figures(eager=1.0), "ours was not timed"),
    ],
)
def test_a_bar_without_its_figure_is_not_measured(bar: Bar, figures: Figures, why: str) -> None:
    """Neither met nor missed, and it says which figure there is not."""
    found = judged(bar, figures)
    assert (found.outcome, found.value, found.why) == ("not measured", None, why)


def test_a_product_is_held_against_a_product() -> None:
    """Operations a second over those of the product that was timed beside it, and in TFLOP/s."""
    found = replace(FOUND, work=Work(400, 4000))
    assert judged(Bar("matmul", 0.4), found).value == pytest.approx(0.4)
    assert judged(Bar("tflops", 1.0), replace(found, work=Work(0, 10**14))).value == pytest.approx(1.0)


def test_what_does_less_is_no_rival() -> None:
    """A part of the work is faster than all of it, which says nothing about who is best."""
    found = replace(FOUND, seconds={**FOUND.seconds, "product alone": 1.0}, parts=("product alone",))
    assert found.fastest() == ("library", 80.0)
    assert found.fastest((EAGER, COMPILE, LIGER)) == (COMPILE, 90.0)


def test_the_backward_pass_is_both_less_forward() -> None:
    """Way by way; one whose forward pass has no time, or takes as long as both, has words."""
    both = _figures("both", ours=300.0, eager=500.0, compile=90.0, library=200.0)
    forward = _figures(ours=100.0, eager=250.0, compile=90.0)
    found = difference(both, forward, Work(800, 0))
    assert dict(found.seconds) == {OURS: 200.0, EAGER: 250.0}
    assert found.words[COMPILE] == "both passes take no longer than forward alone"
    assert found.words["library"] == "its forward pass was not timed alone"
    assert judged(Bar("copy", 1.0, "backward"), found).outcome == "met"


def test_a_line_has_a_cell_for_each_column() -> None:
    """Times in microseconds, words where there are none, the best rival, and what became of the bars."""
    found = [judged(bar, FOUND) for bar in bars(over(eager=2.0, Liger=1.0), Bar("us", 68, goal=True))]
    text = line(replace(FOUND, timers={"library": "events"}), found)
    cells = [cell.strip() for cell in text.strip("|").split("|")]
    assert len(cells) == HEADER.splitlines()[0].count("|") - 1
    assert cells[0] == "softmax: 8192x8192"
    assert cells[5] == "liger_kernel is not installed"
    assert cells[6] == "library 80000000 (events)"
    assert cells[8:10] == ["1.00 (copy)", "0.80 (library)"]
    assert cells[10] == "512 MiB"
    assert "eager/ours 2.5 >= 2: met" in cells[11]
    assert "Liger/ours >= 1: not measured: liger_kernel is not installed" in cells[11]
    assert "goal 1e+08 <= 68 us: missed" in cells[11]


def test_words_do_not_break_the_table() -> None:
    """A message with bars and line breaks stays in its cell."""
    broken = replace(FOUND, seconds={}, words={OURS: "a | b\nc"})
    assert line(broken, []).count("|") == HEADER.splitlines()[0].count("|")


def test_the_summary_counts_bars_and_goals() -> None:
    """Goals are not bars."""
    found = [judged(bar, FOUND) for bar in bars(over(eager=2.0, Liger=1.0), Bar("us", 68, goal=True))]
    assert summary(found) == "2 bars: 1 met, 1 not measured; 1 goals: 1 missed"


@pytest.mark.parametrize(("amount", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (1 << 40, "1024 GiB")])
def test_bytes_have_a_unit(amount: int, text: str) -> None:
    """The largest one that leaves a number above 1, GiB at most."""
    assert size(amount) == text
