"""Latencies as rows of pytest-benchmark, for its tables, files, comparisons and histograms.

Rows come with the reports of tests, so also from pytest-xdist's workers, where pytest-benchmark is off. From
pytest-benchmark (5.2.3 and 5.3.1) this module uses the plugin ``pytest-benchmark``, which is its session, the session's
list ``benchmarks``, and ``stats.Metadata``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pytest_fusion.report import environment

# The key in a stored row that marks it as ours.
_OURS = "fusion"


@dataclass(slots=True)
class Standin:
    """The part of its own fixture that pytest-benchmark reads; it compares by ``fullname``."""

    name: str
    fullname: str
    group: str
    extra_info: dict[str, Any]
    param: None = None
    params: None = None
    cprofile_stats: None = None
    has_error: bool = False


@dataclass(frozen=True, slots=True)
class Timed:
    """One row: its ``seconds`` (one number a sample) and their timer."""

    standin: Standin
    timer: str
    seconds: Sequence[float] = field(default_factory=tuple)


class Benchmarks:
    """Adds latencies to pytest-benchmark's session; there is none with ``-p no:benchmark`` and under ``--codspeed``."""

    def __init__(self, config: pytest.Config, device: str) -> None:
        self._config, self._device = config, device
        self._added: dict[str, Any] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None]:
        """Gives measured tests the fixture that ``--benchmark-only`` and ``--benchmark-skip`` look for."""
        posing: list[tuple[Any, list[str]]] = []
        if self._given("only") or self._given("skip"):
            posing = [(item, item.fixturenames) for item in items if _is_measured(item)]  # type: ignore[attr-defined]
        for item, names in posing:
            item.fixturenames = [*names, "benchmark"]
        try:
            return (yield)
        finally:
            for item, names in posing:
                item.fixturenames = names

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds rows in the process that prints; a repeated test replaces its rows."""
        session = self._config.pluginmanager.get_plugin("pytest-benchmark")
        # Not session.disabled, which pytest-xdist sets too.
        is_off = self._given("skip") or (self._given("disable") and not self._given("enable"))
        if session is None or hasattr(self._config, "workerinput") or is_off:
            return
        for record in getattr(report, "fusion", ()):
            for row in timed_rows(record.get("bench", {}).get("rows", ())):
                self._add(session.benchmarks, row)

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        """Adds GPU and versions; pytest-benchmark's own facts are the CPU's."""
        found = environment.describe(self._device)
        on_gpu = found["lane"] == "cuda"
        machine_info["gpu"] = (
            {"name": found["device_name"], "driver": found["driver"], "cuda": found["cuda"]} if on_gpu else None
        )
        machine_info["fusion"] = {name: found[name] for name in ("pytest_fusion", "torch", "triton")}

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_benchmark_compare_machine_info(
        self, machine_info: Mapping[str, Any], compared_benchmark: Mapping[str, Any]
    ) -> None:
        """Raises ``UsageError`` if a stored run has rows of this plugin from another GPU."""
        why = other_gpu(machine_info, compared_benchmark)
        if why is not None:
            raise pytest.UsageError(why)

    def _given(self, name: str) -> bool:
        return bool(self._config.getoption(f"benchmark_{name}", False))

    def _add(self, rows: list[Any], row: Timed) -> None:
        from pytest_benchmark.stats import Metadata

        made = Metadata(row.standin, iterations=1, options={"timer": row.timer})
        for seconds in row.seconds:
            made.update(seconds)
        before = self._added.get(row.standin.fullname)
        self._added[row.standin.fullname] = made
        if before is None:
            rows.append(made)
        else:
            rows[rows.index(before)] = made


def timed_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[Timed]:
    """The rows of pytest-benchmark for the ``rows`` of one test (``Row.as_json``): each side of each latency."""
    facts = {(row["case"], row["role"]): row.get("facts", {}) for row in rows}
    for row in rows:
        latency = row.get("latency")
        if latency is None:
            continue
        # Without raw samples, the medians: one round each.
        medians = {"fused": [latency["fused_s"]], "reference": [latency["reference_s"]]}
        for side, seconds in {**medians, **row.get("samples", {})}.items():
            role = row["role"].replace("fused", side, 1)
            short, case = row["test"].rpartition("::")[2], row["case"]
            extra: dict[str, Any] = {**facts.get((case, role), {}), _OURS: {"case": case, "role": role}}
            if side == "fused":
                extra[_OURS] |= {name: latency[name] for name in ("ratio", "low", "high")}
            standin = Standin(f"{short} {case} {role}", f"{row['test']}::{case}::{role}", f"{short} {case}", extra)
            yield Timed(standin, latency["method"].get("timer", ""), seconds)


def other_gpu(machine_info: Mapping[str, Any], stored: Mapping[str, Any]) -> str | None:
    """Why the rows of a stored run do not compare with those of here; ``None`` if they do, or are not ours."""
    if not any(_OURS in (row.get("extra_info") or {}) for row in stored.get("benchmarks", ())):
        return None
    there, here = _gpu(stored.get("machine_info", {})), _gpu(machine_info)
    if there == here:
        return None
    return (
        f"--benchmark-compare: the stored run was made on {there}, this one is on {here}, and times on different GPUs "
        "do not compare; name a run of this GPU (--benchmark-compare=NUMBER), or store one with --benchmark-save NAME"
    )


def _gpu(machine_info: Mapping[str, Any]) -> str:
    found = machine_info.get("gpu")
    return "no GPU" if found is None else str(found.get("name") or "an unnamed GPU")


def _is_measured(item: pytest.Item) -> bool:
    if not hasattr(item, "fixturenames"):
        return False
    spec = getattr(getattr(item, "obj", None), "fusion_spec", None)
    return "fusion_bench" in item.fixturenames or bool(getattr(spec, "bench", None))
