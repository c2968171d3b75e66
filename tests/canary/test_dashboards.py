"""Dashboard and analysis templates: each metric, label and value that a query names is one that is exported."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra metrics")
pytest.importorskip("yaml", reason="needs pyyaml")

from pytest_fusion.canary.evidence.prometheus import METRICS
from tests.canary.queries import ADDED, FOLDER, ROOT, dashboard, dashboard_queries, series, template_queries

# What the labels with few values may say.
_VALUES = {
    "arm": {"incumbent", "candidate"},
    "mode": {"shadow", "route", "full"},
    "result": {"ok", "violation", "nonfinite", "error", "skipped"},
    "reason": {"error", "hang", "structure", "not routed"},
    "state": {"off", "shadow", "route", "full", "tripped"},
}


def _wrong(query: str) -> list[str]:
    """What the query names and nobody exports."""
    found: list[str] = []
    for one in series(query):
        kind, labels = METRICS.get(one.name, ("", ()))
        if not kind:
            base = re.sub(r"_(bucket|sum|count)$", "", one.name)
            kind, labels = METRICS.get(base, ("", ()))
            if kind != "histogram":
                found.append(one.name)
                continue
        allowed = {*labels, *ADDED, *({"le"} if one.name.endswith("_bucket") else ())}
        found += [f"{one.name}{{{label}}}" for label in {*one.matched, *one.grouped} - allowed]
        found += [
            f"{one.name}{{{label}={value}}}"
            for label, values in one.matched.items()
            for value in values
            if label in _VALUES and value not in _VALUES[label]
        ]
    return found


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ('sum by (arm) (rate(fusion_canary_calls_total{op="a",mode="route"}[5m]))', []),
        ("rate(fusion_canary_calls[5m])", ["fusion_canary_calls"]),
        ("fusion_canary_calls_total_count", ["fusion_canary_calls_total_count"]),
        ('fusion_canary_state{kernel="a"}', ["fusion_canary_state{kernel}"]),
        ('fusion_canary_state{op="a",state=~"route|gone"}', ["fusion_canary_state{state=gone}"]),
        ("sum by (bucket) (fusion_canary_weight_ratio)", ["fusion_canary_weight_ratio{bucket}"]),
        ("sum by (le) (fusion_canary_latency_ratio_bucket)", []),
        ("sum by (le) (fusion_canary_latency_ratio_sum)", ["fusion_canary_latency_ratio_sum{le}"]),
    ],
)
def test_a_query_for_what_is_not_exported_is_seen(query: str, wrong: list[str]) -> None:
    """The check below would see a wrong metric, label or value, and allows the right ones."""
    assert _wrong(query) == wrong


def test_the_dashboard_asks_for_what_is_exported() -> None:
    """Every query of every panel; and every metric is on some panel."""
    queries = dashboard_queries()
    assert [_wrong(query) for query in queries] == [[]] * len(queries)

    shown = {re.sub(r"_(bucket|sum|count)$", "", one.name) for query in queries for one in series(query)}
    assert shown == set(METRICS)


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """Panels have ids of their own, do not lie on each other, and use the data source that one chooses."""
    board = dashboard()
    panels = board["panels"]
    squares = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len(set(squares)) == len(squares)
    assert max(x for x, _ in squares) < 24
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "op"}
    assert {target["datasource"]["uid"] for panel in panels for target in panel["targets"]} == {"${datasource}"}


def test_the_templates_ask_for_what_is_exported() -> None:
    """The YAML is read as a controller reads it; each query names what is exported, for one kernel."""
    queries = template_queries("softmax")

    assert {name.partition(":")[0] for name in queries} == {"argo-rollouts.yaml", "flagger.yaml"}
    assert [_wrong(query) for query in queries.values()] == [[]] * len(queries)
    for query in queries.values():
        assert series(query)
        assert all(one.matched["op"] == ["softmax"] for one in series(query))
        assert "{{" not in query


def test_the_page_lists_what_is_exported() -> None:
    """Names and labels of the table in the documentation are those of the code."""
    page = (ROOT / "docs" / "canary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(fusion_canary_\w+)` \| (\w+) \| ([^|]*) \|", page, re.MULTILINE)

    assert {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows} == dict(METRICS)


def test_the_job_runs_a_command_that_exists() -> None:
    """The judge's job in the template is a command line that is taken."""
    import yaml

    from pytest_fusion.plugin.cli import _parser

    documents = list(yaml.safe_load_all((FOLDER / "argo-rollouts.yaml").read_text(encoding="utf-8")))
    (metric,) = documents[1]["spec"]["metrics"]
    (container,) = metric["provider"]["job"]["spec"]["template"]["spec"]["containers"]

    assert container["command"][0] == "pytest-fusion"
    given = _parser().parse_args(container["command"][1:])
    assert (given.view, given.judge) == ("status", True)
