"""`Prometheus`: exports the canaries of a process as metrics, by ``prometheus_client``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from pytest_fusion.canary.evidence.evidence_counts import Evidence
from pytest_fusion.canary.evidence.promotion_rules import RULES, Rules
from pytest_fusion.canary.live.policy import STATES, Mode
from pytest_fusion.errors import CanaryError

# Name, kind and labels of each exported metric. The values of labels are bounded: canaries, states, words here.
METRICS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "fusion_canary_calls_total": ("counter", ("op", "arm", "mode")),
    "fusion_canary_comparisons_total": ("counter", ("op", "result")),
    "fusion_canary_fallbacks_total": ("counter", ("op", "reason")),
    "fusion_canary_error_ratio": ("histogram", ("op",)),
    "fusion_canary_latency_ratio": ("histogram", ("op",)),
    "fusion_canary_shadow_gpu_seconds_total": ("counter", ("op",)),
    "fusion_canary_weight_ratio": ("gauge", ("op",)),
    "fusion_canary_state": ("gauge", ("op", "state")),
    "fusion_canary_info": ("gauge", ("op", "rollout_id", "incumbent", "candidate")),
    "fusion_canary_publish_errors_total": ("counter", ("op",)),
}
_HELP = {
    "fusion_canary_calls_total": "Calls by the kernel that served them and the state; none while off or tripped.",
    "fusion_canary_comparisons_total": "Runs of the candidate by result.",
    "fusion_canary_fallbacks_total": "Calls routed to the candidate that the incumbent served instead.",
    "fusion_canary_error_ratio": "Error of the candidate as a multiple of the incumbent's, of one call.",
    "fusion_canary_latency_ratio": "Latency of the candidate as a multiple of the incumbent's, of a block of pairs.",
    "fusion_canary_shadow_gpu_seconds_total": "GPU time that was spent on comparing the kernels.",
    "fusion_canary_weight_ratio": "Share of the requests that go to the candidate.",
    "fusion_canary_state": "1 for the state that the canary is in.",
    "fusion_canary_info": "1 for the current rollout.",
    "fusion_canary_publish_errors_total": "Events that a publisher raised an error for.",
}
_BOUNDS = {
    "fusion_canary_error_ratio": (0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0),
    "fusion_canary_latency_ratio": (0.8, 0.9, 0.95, 0.97, 0.99, 1.0, 1.01, 1.03, 1.05, 1.1, 1.25),
}
# Results of another form and changed arguments count as wrong results.
_RESULTS = {
    "ok": "ok",
    "violation": "violation",
    "structure": "violation",
    "inputs": "violation",
    "nonfinite": "nonfinite",
    "error": "error",
    "hang": "error",
    "skipped": "skipped",
}
_REASONS = ("error", "hang", "structure", "not routed")
_STATES = (*STATES, "tripped")


class Prometheus:
    """A publisher for any number of canaries: ``canary(..., publishers=[prometheus])``. Supports multi-process mode.
    Counters grow at each ``Policy(interval_s)``. ``rules`` are those of the canaries. Raises ``CanaryError`` for a
    second publisher on the same ``registry``."""

    def __init__(self, registry: CollectorRegistry = REGISTRY, rules: Rules = RULES) -> None:
        self._rules = rules
        self._infos: dict[str, tuple[str, ...]] = {}
        try:
            self._metrics: dict[str, Any] = {name: _metric(name, registry) for name in METRICS}
        except ValueError as error:
            raise CanaryError(
                f"Prometheus(): {error}. Make one for a registry and give it to all canaries: publishers=[prometheus]"
            ) from error

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Processes an event of a canary's log. Raises for an invalid one, which the canary counts."""
        op, kind = event["name"], event["event"]
        if kind in ("start", "rearm"):
            self._create_series(op)
            self._set_info(op, (event["rollout"], event["incumbent"], event["candidate"]))
            self._set_state(op, event["state"])
        elif kind == "state":
            self._set_state(op, event["now"])
        elif kind == "trip":
            self._set_state(op, "tripped")
        elif kind == "block":
            self._count(op, event)
            self._observe(op, event)

    def _create_series(self, op: str) -> None:
        """Creates all series at 0, so that the first event shows as an increase and missing data as a fault."""
        series: dict[str, Iterable[tuple[str, ...]]] = {
            "calls_total": itertools.product(("incumbent", "candidate"), ("shadow", "route", "full")),
            "comparisons_total": ((result,) for result in sorted({*_RESULTS.values()})),
            "fallbacks_total": ((reason,) for reason in _REASONS),
        }
        for name in ("error_ratio", "latency_ratio", "shadow_gpu_seconds_total", "publish_errors_total"):
            self._metrics[f"fusion_canary_{name}"].labels(op)
        for name, many in series.items():
            for labels in many:
                self._metrics[f"fusion_canary_{name}"].labels(op, *labels)

    def _set_info(self, op: str, labels: tuple[str, ...]) -> None:
        before = self._infos.get(op)
        if before is not None and before != labels:
            self._metrics["fusion_canary_info"].labels(op, *before).set(0)
        self._infos[op] = labels
        self._metrics["fusion_canary_info"].labels(op, *labels).set(1)

    def _set_state(self, op: str, state: str) -> None:
        mode = Mode("off") if state == "tripped" else Mode.parse(state, 0.0)
        current = "tripped" if state == "tripped" else mode.state
        for name in _STATES:
            self._metrics["fusion_canary_state"].labels(op, name).set(name == current)
        self._metrics["fusion_canary_weight_ratio"].labels(op).set(mode.share)

    def _count(self, op: str, event: Mapping[str, Any]) -> None:
        for state, arm, many in event.get("served", ()):
            self._metrics["fusion_canary_calls_total"].labels(op, arm, state).inc(many)
        for what, many in event.get("new", {}).items():
            kind, _, rest = what.partition(": ")
            if kind == "compared":
                self._metrics["fusion_canary_comparisons_total"].labels(op, _RESULTS[rest]).inc(many)
            elif kind == "skipped":
                self._metrics["fusion_canary_comparisons_total"].labels(op, "skipped").inc(many)
            elif what == "not routed" or (kind == "fallbacks" and rest in _REASONS):
                self._metrics["fusion_canary_fallbacks_total"].labels(op, rest or what).inc(many)
        self._metrics["fusion_canary_shadow_gpu_seconds_total"].labels(op).inc(event.get("gpu_s", 0.0))
        self._metrics["fusion_canary_publish_errors_total"].labels(op).inc(event.get("publish_errors", 0))

    def _observe(self, op: str, event: Mapping[str, Any]) -> None:
        scales = self._rules.scales()
        for cell, tally in Evidence.from_json(event["evidence"]).tallies.items():
            metric = self._metrics.get(f"fusion_canary_{cell.metric}")
            if metric is None or cell.arm != "candidate" or cell.metric not in scales:
                continue
            for index, many in tally.counts.items():
                for _ in range(many):
                    metric.labels(op).observe(math.exp(scales[cell.metric].value(index)))


def _metric(name: str, registry: CollectorRegistry) -> Any:
    kind, labels = METRICS[name]
    if kind == "counter":
        return Counter(name.removesuffix("_total"), _HELP[name], labels, registry=registry)
    if kind == "histogram":
        return Histogram(name, _HELP[name], labels, buckets=_BOUNDS[name], registry=registry)
    # With several processes behind one port, every state of a live process is shown.
    return Gauge(name, _HELP[name], labels, registry=registry, multiprocess_mode="livemax")
