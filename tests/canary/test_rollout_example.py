"""The rollout among the examples: from shadow by routing to the trip and back, with a Prometheus that looks on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_fusion.plugin.cli import main
from tests.canary.queries import ROOT, dashboard_queries, template_queries

# A path, or "apt" to fetch the package of Debian into the folder of the test run.
_WHERE = "PYTEST_FUSION_PROMETHEUS"


@pytest.mark.slow
def test_from_shadow_to_rollback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fuzzing finds offline what traffic does not have; live, the inferior softmax passes on ordinary traffic, serves a
    share, meets what it gets wrong, and is gone: from this process, from one that starts later, from the verdict."""
    # In a process of its own: one that starts CUDA cannot fork for it, as other tests do.
    command = [sys.executable, "-m", "examples.rollout", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=600)
    steps = {step.pop("step"): step for step in map(json.loads, done.stdout.splitlines())}

    traffic, fuzzed = steps["compared on the traffic"], steps["compared on fuzzed cases too"]
    assert (traffic["calls"], traffic["verdict"], traffic["exit"]) == (40, "promote", 0), traffic
    assert (fuzzed["verdict"], fuzzed["exit"]) == ("rollback", 1), fuzzed
    assert "the incumbent does not fail" in fuzzed["reasons"][0]
    assert steps["off"] == {"state": "off", "tripped": None, "counts": {}}
    assert steps["shadow"] == {"state": "shadow", "tripped": None, "counts": {"compared: ok": 60}, "wrong": 0}
    assert (steps["route"]["state"], steps["route"]["wrong"]) == ("route 0.5", 0)
    assert 10 < steps["route"]["counts"]["served by the candidate"] < 50
    large = steps["large requests arrive"]
    assert large["state"] == "tripped"
    assert "nonfinite" in large["tripped"]
    assert large["wrong"] > 0, "until the comparison is read, callers get what the candidate says"
    assert (steps["after the trip"]["state"], steps["after the trip"]["wrong"]) == ("tripped", 0)
    assert steps["a process that starts later"]["state"] == "tripped"
    assert main(["canary", "status", str(tmp_path / "logs"), "--judge"]) == 1
    assert "nonfinite in float32" in capsys.readouterr().out


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The server's binary."""
    where = os.environ.get(_WHERE) or shutil.which("prometheus")
    if where is None:
        pytest.skip(f"no prometheus on PATH; {_WHERE}=apt fetches the Debian package, {_WHERE}=/path names a binary")
    if where != "apt":
        return where
    folder = tmp_path_factory.mktemp("prometheus")
    subprocess.run(["apt-get", "download", "prometheus"], cwd=folder, check=True, capture_output=True, timeout=300)
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", package, folder / "x"], check=True, timeout=120)
    return str(folder / "x/usr/bin/prometheus")


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def _running(*command: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([str(part) for part in command], text=True, **options) as process:
        try:
            yield process
        finally:
            process.terminate()


class _Server:
    """A Prometheus on loopback."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, query: str) -> list[Any]:
        """The result of an instant query; none while the server does not answer."""
        url = f"http://127.0.0.1:{self._port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return list(json.load(answer)["data"]["result"])
        except OSError:
            return []

    def until(self, query: str, holds: Callable[[float], bool]) -> None:
        ends = time.monotonic() + 120
        while time.monotonic() < ends:
            found = self.ask(query)
            if found and holds(float(found[0]["value"][1])):
                return
            time.sleep(0.2)
        pytest.fail(f"{query} is {self.ask(query)}")


def test_a_prometheus_that_scrapes_it_answers_the_dashboard(prometheus: str, tmp_path: Path) -> None:
    """Through shadow, routing and the trip, every query of dashboard and templates returns data, and the right one."""
    pytest.importorskip("prometheus_client", reason="needs the extra metrics")
    pytest.importorskip("yaml", reason="needs pyyaml")
    metrics, web = _free_port(), _free_port()
    config = tmp_path / "prometheus.yml"
    text = (ROOT / "examples" / "rollout" / "prometheus.yml").read_text(encoding="utf-8")
    config.write_text(text.replace("localhost:8001", f"127.0.0.1:{metrics}").replace("5s", "1s"))
    (tmp_path / "states").write_text("softmax: shadow\n")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    serving = [sys.executable, "-m", "examples.rollout.serve", "--folder", tmp_path, "--port", metrics]
    scraping = [
        prometheus,
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{web}",
    ]
    server = _Server(web)
    with _running(*serving, "--seconds", 300, cwd=ROOT, stdout=subprocess.PIPE) as served, _running(*scraping, **quiet):
        server.until('fusion_canary_calls_total{arm="incumbent",mode="shadow"}', lambda value: value > 50)
        server.until('fusion_canary_comparisons_total{result="ok"}', lambda value: value > 20)
        server.until("fusion_canary_latency_ratio_count", lambda value: value > 0)
        server.until("fusion_canary_error_ratio_count", lambda value: value > 0)
        (tmp_path / "states").write_text("softmax: route 0.5\n")
        server.until("fusion_canary_weight_ratio", lambda value: value == 0.5)
        server.until('fusion_canary_calls_total{arm="candidate",mode="route"}', lambda value: value > 5)
        (tmp_path / "traffic").write_text("large\n")
        server.until('fusion_canary_state{state="tripped"}', lambda value: value == 1)
        server.until("fusion_canary_weight_ratio", lambda value: value == 0)

        empty = [query for query in [*dashboard_queries(), *template_queries().values()] if not server.ask(query)]
        wrong = server.ask(template_queries()["flagger.yaml:fusion-wrong"])
        tripped = server.ask(template_queries()["argo-rollouts.yaml:not-tripped"])
        (tmp_path / "stop").write_text("")
        output, _ = served.communicate(timeout=120)

    assert empty == []
    assert float(wrong[0]["value"][1]) > 0
    assert float(tripped[0]["value"][1]) == 1
    assert json.loads(output)["state"] == "tripped"
