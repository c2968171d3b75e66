"""What a canary found, in the terminal and on the page."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_fusion.report.canary_table import canary_lines, canary_rows, decision
from pytest_fusion.report.html.page import render
from tests.report.conftest import Make


def told(verdict: str, **changes: Any) -> dict[str, Any]:
    """The ``canary`` of a record, with one case that only the candidate fails and latencies of one size."""
    ran = {"verdict": "fail", "check": "values", "reason": "off by <b>"}
    worse = {"text": "rows=1", "source": "fuzzed", "standing": "worse", "reason": "values: off by <b>"}
    return {
        "verdict": verdict,
        "reasons": [f"why {verdict}"],
        "metrics": [
            {"metric": "error", "status": "nodata", "role": "ordinary", "words": "undecided", "value": 0.1},
            {"metric": "latency", "status": "nodata", "role": "critical", "words": "not measured", "value": None},
            {"metric": "memory", "status": "nodata", "role": "muted", "words": "not measured", "value": None},
        ],
        "counts": {"worse": 1, "passes": 30, "not-asked": 4},
        "incumbent": {"text": "git:main", "kind": "revision", "commit": "0123456789abcdef"},
        "pairs": [{**worse, "candidate": ran, "incumbent": {"verdict": "pass"}}] * 41
        + [{**worse, "standing": "passes", "candidate": {"verdict": "pass"}, "incumbent": {"verdict": "pass"}}],
        "latency": [
            {"text": "rows=4096", "ratio": 0.0, "low": 0.0, "high": 0.0, "candidate_s": 2e-6, "incumbent_s": 3e-6}
        ],
        "notes": ["a note"],
        **changes,
    }


def test_the_table(passing: Make) -> None:
    """The gravest test is first, each has its figures and reasons, and what to leave out is named where one is held."""
    records = [
        passing(nodeid="a", canary=told("promote")),
        passing(nodeid="bb", canary=told("hold")),
        passing(nodeid="c", canary=told("rollback")),
        passing(nodeid="not compared"),
    ]
    lines = [text for text, _ in canary_lines(records)]
    assert lines[0] == "canary against git:main (0123456789ab)"
    assert [line.split()[:2] for line in lines if "30 passes" in line] == [
        ["rollback", "c"],
        ["hold", "bb"],
        ["promote", "a"],
    ]
    assert "          why rollback" in lines
    assert "          note: a note" in lines
    (advice,) = [line for line in lines if "--fusion-canary-without" in line]
    assert advice.endswith("--fusion-canary-without latency")
    assert lines[-1] == "canary: 1 rollback, 1 hold, 1 promote"


@pytest.mark.parametrize(
    ("verdicts", "decides"),
    [
        (["promote", "hold"], "hold"),
        (["hold", "nodata"], "nodata"),
        (["nodata", "error"], "error"),
        (["error", "rollback", "promote"], "rollback"),
        (["promote"], "promote"),
        ([], "nodata"),
    ],
)
def test_what_decides_for_all(passing: Make, verdicts: list[str], decides: str) -> None:
    """One test that is not promoted keeps all others back, and no test at all is no promotion."""
    assert decision([passing(), *(passing(canary=told(verdict)) for verdict in verdicts)]) == decides


def test_the_page(passing: Make) -> None:
    """Metrics, cases that differ and latencies stand on the page, escaped, the cases up to a number; passes do not."""
    records = [
        passing(canary=told("rollback")),
        passing(canary=told("nodata", metrics=[], counts={}, pairs=[], latency=[])),
    ]
    page = render(records, {})
    assert "off by &lt;b&gt;" in page
    assert "1 more in the JSON report" in page
    assert "<th>latency</th>" in page
    assert "no case" in page
    assert "<th>of the calls</th>" not in page
    first, second = canary_rows(records)
    latency = ("rows=4096", "", "2", "3", "1.000 (1.000 to 1.000)")
    assert (first["verdict"], len(first["pairs"]), first["latency"]) == ("rollback", 40, (latency,))
    assert (second["verdict"], second["pairs"]) == ("nodata", ())
    assert "Canary" not in render([passing()], {})


def test_classes_of_recorded_traffic_show_their_share(passing: Make) -> None:
    """Beside each class of shapes stands how much of the calls it is, and the ratio with its interval."""
    timing = {"text": "float16[2^4]", "ratio": 0.0953, "low": 0.0, "high": 0.1823, "candidate_s": 2e-6}
    timings = [{**timing, "incumbent_s": 3e-6, "share": 0.125}]
    page = render([passing(canary=told("promote", latency=timings))], {})

    assert "<th>of the calls</th>" in page
    assert "<td>12.5%</td>" in page
    assert "1.100 (1.000 to 1.200)" in page
