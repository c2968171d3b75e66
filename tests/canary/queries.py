"""The queries of the dashboard and of the analysis templates, and what they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "canary"
# Labels that Prometheus, or Kubernetes by way of it, adds to whatever it scrapes.
ADDED = {"instance", "job", "namespace", "pod"}
_SERIES = re.compile(r"(?P<name>fusion_canary_\w+)\s*(?:\{(?P<labels>[^}]*)\})?")
_MATCH = re.compile(r'(?P<label>\w+)\s*(?P<how>=~|!~|!=|=)\s*"(?P<value>[^"]*)"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\((?P<labels>[^)]*)\)")


class Series(NamedTuple):
    """A series that a query names: matched labels with the values that are named, and labels that are kept."""

    name: str
    matched: dict[str, list[str]]
    grouped: set[str]


def dashboard() -> Any:
    return json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))


def dashboard_queries() -> list[str]:
    """As Grafana sends them, for all kernels and half a minute."""
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return [query.replace("$__rate_interval", "30s").replace("$op", ".*") for query in queries]


def template_queries(op: str = "softmax") -> dict[str, str]:
    """By file and name, with the placeholders of Argo and Flagger filled in; Flagger's namespace is left out."""
    import yaml

    found: dict[str, str] = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        # Placeholders of templates are texts to YAML, and it must read the file as the controller does.
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            spec, name = document["spec"], document["metadata"]["name"]
            if document["kind"] == "MetricTemplate":
                found[f"{path.name}:{name}"] = spec["query"]
            for metric in spec.get("metrics", ()):
                if "prometheus" in metric["provider"]:
                    found[f"{path.name}:{metric['name']}"] = metric["provider"]["prometheus"]["query"]
    filled = {"{{args.op}}": op, "{{ variables.op }}": op, "{{ interval }}": "1m", ', namespace="{{ namespace }}"': ""}
    for placeholder, value in filled.items():
        found = {name: query.replace(placeholder, value) for name, query in found.items()}
    return found


def series(query: str) -> list[Series]:
    grouped = {label.strip() for one in _GROUPING.finditer(query) for label in one["labels"].split(",")}
    return [
        Series(
            one["name"],
            {match["label"]: match["value"].split("|") for match in _MATCH.finditer(one["labels"] or "")},
            grouped,
        )
        for one in _SERIES.finditer(query)
    ]
