"""The metrics that a scraper sees: named as documented, equal to what was counted, bounded in number."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion import canary
from pytest_fusion.canary import Canary, Policy
from pytest_fusion.canary.live.comparing import call_pairs
from pytest_fusion.errors import CanaryError
from tests.canary.kernels import Kernel, added, double

client = pytest.importorskip("prometheus_client", reason="needs the extra metrics")

from pytest_fusion.canary.evidence.prometheus import METRICS, Prometheus  # noqa: E402


def _published(candidate: Kernel = added, incumbent: Kernel = double, **policy: Any) -> tuple[Canary, Any]:
    registry = client.CollectorRegistry()
    options = {"interval_s": 3600.0, "shadow": 1.0, "timed": 0.0, **policy}
    kernel = canary(
        "rms_norm",
        incumbent=incumbent,
        candidate=candidate,
        policy=Policy(**options),
        publishers=[Prometheus(registry)],
    )
    return kernel, registry


def _value(registry: Any, name: str, **labels: str) -> float:
    found = registry.get_sample_value(name, {"op": "rms_norm", **labels})
    return 0.0 if found is None else found


def test_what_was_counted_is_what_is_scraped() -> None:
    """Calls by kernel and state, comparisons, state and weight, as the canary's own status has them."""
    kernel, registry = _published(verify=0.5)
    for _ in range(30):
        kernel(torch.ones(4))
    kernel.set_state("full")
    kernel.set_state(None)
    kernel.refresh()

    assert _value(registry, "fusion_canary_calls_total", arm="incumbent", mode="shadow") == 30
    assert _value(registry, "fusion_canary_comparisons_total", result="ok") == 30
    assert _value(registry, "fusion_canary_state", state="shadow") == 1
    assert _value(registry, "fusion_canary_weight_ratio") == 0
    info = {"rollout_id": "1", "incumbent": "tests.canary.kernels:double", "candidate": "tests.canary.kernels:added"}
    assert _value(registry, "fusion_canary_info", **info) == 1
    assert _value(registry, "fusion_canary_publish_errors_total") == 0


def test_a_rollout_that_is_routed_and_tripped_is_seen() -> None:
    """The share, the calls that the candidate served, its failures by kind, and the trip; then the next rollout."""
    fail: list[bool] = []

    def candidate(x: torch.Tensor) -> torch.Tensor:
        if fail:
            raise RuntimeError("no")
        return x * 2

    kernel, registry = _published(candidate, state="route", share=0.25, verify=0.0, trip_after=2)
    for _ in range(200):
        kernel(torch.ones(4))
    kernel.refresh()
    served = _value(registry, "fusion_canary_calls_total", arm="candidate", mode="route")
    assert served == kernel.status()["counts"]["served by the candidate"] > 10
    assert served + _value(registry, "fusion_canary_calls_total", arm="incumbent", mode="route") == 200
    assert _value(registry, "fusion_canary_weight_ratio") == 0.25

    fail.append(True)
    for _ in range(200):
        kernel(torch.ones(4))
    kernel.refresh()
    assert _value(registry, "fusion_canary_fallbacks_total", reason="error") == 2
    assert _value(registry, "fusion_canary_comparisons_total", result="error") == 2
    states = {state: _value(registry, "fusion_canary_state", state=state) for state in ("route", "tripped", "off")}
    assert states == {"route": 0, "tripped": 1, "off": 0}
    assert _value(registry, "fusion_canary_weight_ratio") == 0

    kernel.rearm("2")
    kernel.refresh()
    infos = [sample for family in registry.collect() for sample in family.samples if sample.name.endswith("_info")]
    assert {sample.labels["rollout_id"]: sample.value for sample in infos} == {"1": 0, "2": 1}
    assert _value(registry, "fusion_canary_weight_ratio") == 0.25


@pytest.mark.parametrize(
    ("candidate", "result"),
    [
        (lambda x: x * 3, "violation"),
        (lambda x: x[:-1] * 2, "violation"),
        (lambda x: x * 2 + torch.inf, "nonfinite"),
        (lambda x: 1 / 0, "error"),
    ],
    ids=["values", "shape", "nonfinite", "raises"],
)
def test_results_have_few_names(candidate: Kernel, result: str) -> None:
    """Whatever a candidate does is one of five results, so that one query sees all that is wrong."""
    kernel, registry = _published(candidate)
    kernel(torch.ones(4))
    kernel.refresh()

    assert _value(registry, "fusion_canary_comparisons_total", result=result) == 1


def test_latency_ratios_are_a_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that takes 4 % longer is between 1.03 and 1.05, in every block."""
    now = [0.0]
    monkeypatch.setattr(call_pairs.time, "perf_counter", lambda: now[0])

    def timed(seconds: float) -> Kernel:
        def call(x: torch.Tensor) -> torch.Tensor:
            now[0] += seconds
            return x * 2

        return call

    kernel, registry = _published(timed(1.04), timed(1.0), timed=1.0)
    for _ in range(120):
        kernel(torch.ones(4))
        kernel.refresh()

    blocks = kernel.evidence().pooled("latency_ratio").seen
    assert blocks >= 3
    assert _value(registry, "fusion_canary_latency_ratio_count") == blocks
    assert _value(registry, "fusion_canary_latency_ratio_bucket", le="1.03") == 0
    assert _value(registry, "fusion_canary_latency_ratio_bucket", le="1.05") == blocks


def test_names_and_labels_are_those_that_are_documented() -> None:
    """All metrics of the table are exported, with its labels, and nothing else."""
    kernel, registry = _published(lambda x: 1 / 0, state="full", verify=1.0)
    for width in (1, 2, 3, 4, 5):
        kernel(torch.ones(width))
        kernel(torch.ones(width))
    kernel.refresh()

    found: dict[str, set[str]] = {}
    for family in registry.collect():
        name = family.name + "_total" * (family.type == "counter")
        found[name] = {label for sample in family.samples for label in sample.labels if label != "le"}
    assert set(found) == set(METRICS)
    assert {name: labels for name, labels in found.items() if labels and labels != set(METRICS[name][1])} == {}


def test_32_threads_lose_no_call_on_the_way_to_the_scraper() -> None:
    """While blocks are written at once from several threads too, each call is published once."""
    kernel, registry = _published(shadow=0.1)
    start = threading.Barrier(32)

    def work(number: int) -> None:
        start.wait()
        for step in range(40):
            kernel(torch.ones(1 + step % 3))
            if number % 8 == 0 and step % 10 == 0:
                kernel.refresh()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kernel.refresh()

    assert _value(registry, "fusion_canary_calls_total", arm="incumbent", mode="shadow") == 32 * 40
    compared = kernel.status()["counts"]["compared: ok"]
    assert _value(registry, "fusion_canary_comparisons_total", result="ok") == compared


def test_a_publisher_that_raises_is_counted_where_it_can_be_seen() -> None:
    """Another publisher's errors are in the metrics, and break no call."""

    def broken(event: Any) -> None:
        raise RuntimeError("unreachable")

    registry = client.CollectorRegistry()
    kernel = canary(
        "rms_norm",
        incumbent=double,
        candidate=added,
        policy=Policy(shadow=1.0, interval_s=3600),
        publishers=[broken, Prometheus(registry)],
    )
    for _ in range(3):
        assert torch.equal(kernel(torch.ones(2)), torch.full((2,), 2.0))
        kernel.refresh()

    assert _value(registry, "fusion_canary_publish_errors_total") >= 2
    assert kernel.status()["publish_errors"] > _value(registry, "fusion_canary_publish_errors_total")


def test_one_for_a_registry() -> None:
    """A second one would export everything twice, and says how to share the first."""
    registry = client.CollectorRegistry()
    Prometheus(registry)
    with pytest.raises(CanaryError, match=r"publishers=\[prometheus\]"):
        Prometheus(registry)


_WORKER = """
import os, torch
from pytest_fusion import canary
from pytest_fusion.canary import Policy
from pytest_fusion.canary.evidence.prometheus import Prometheus
kernel = canary("k", incumbent=lambda x: x * 2, candidate=lambda x: x + x, policy=Policy(shadow=1.0, interval_s=3600),
                publishers=[Prometheus()])
for _ in range(7):
    kernel(torch.ones(2))
kernel.refresh()
os._exit(0)
"""
_SCRAPE = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


@pytest.mark.slow
def test_several_processes_behind_one_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the multi-process mode of prometheus_client the counters of all workers add up."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for _ in range(2):
        subprocess.run([sys.executable, "-c", _WORKER], check=True, timeout=120)
    done = subprocess.run([sys.executable, "-c", _SCRAPE], check=True, timeout=120, capture_output=True, text=True)

    assert 'fusion_canary_comparisons_total{op="k",result="ok"} 14.0' in done.stdout
    assert 'fusion_canary_calls_total{arm="incumbent",mode="shadow",op="k"} 14.0' in done.stdout
