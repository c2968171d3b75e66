"""What ``bench=`` names, measured behind a green test, in the record of that test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_fusion.bench.bench_request import BenchRequest
from pytest_fusion.engine.isolated import why_not_isolated
from pytest_fusion.engine.job import Job
from pytest_fusion.report import environment
from pytest_fusion.report.record import TestRecord

if TYPE_CHECKING:
    from pytest_fusion.bench.measured import Measured


def benched(job: Job, record: TestRecord, wanted: BenchRequest) -> TestRecord:
    """The record of a green test with what ``bench=`` names, measured; a regression fails it."""
    from pytest_fusion.bench.bench_run import bench

    request = job.request
    found = bench(
        job.spec,
        wanted,
        nodeid=request.nodeid,
        environment=environment.describe(request.device),
        extra=job.extra,
        isolated=why_not_isolated(request) is None,
    )
    return with_bench(record, found, wanted, job.spec.name)


def with_bench(record: TestRecord, found: Measured, wanted: BenchRequest, name: str) -> TestRecord:
    """The record of a green test with what was measured behind it; a regression fails it."""
    from pytest_fusion.bench.measured import failure_line

    # A new baseline accepts a regression, but not a broken limit.
    accepted = wanted.update in ("regressed", "all")
    record = replace(record, bench=found.as_json(accepted=accepted) if found.rows or found.notes else {})
    if found.wrong:
        return _failed(record, name, found.wrong, why=": it is wrong at sizes of bench=, and is not measured there")
    if found.refused:
        return _failed(record, name, found.refused, why=": it does not compile", cause="does-not-compile")
    failures = [one for one in found.failures if not accepted or one in found.limits]
    if not failures:
        return record
    only_limits = all(one in found.limits for one in failures)
    accept = "change bench_limits=" if only_limits else "accept it with --fusion-update regressed"
    # The message of a missing baseline says how to make one.
    missing = all(getattr(one, "verdict", "") == "missing" for one in failures)
    advice = "" if missing else f"\n  {accept}, or fix the kernel"
    return _failed(record, name, [failure_line(one) for one in failures], advice=advice)


def _failed(
    record: TestRecord, name: str, lines: Sequence[str], *, why: str = "", advice: str = "", cause: str | None = None
) -> TestRecord:
    message = "\n".join([f"{name}: bench failed{why}", *(f"  {line}" for line in lines)]) + advice
    checks = {**record.checks, "bench": {"verdict": "fail", "reason": "; ".join(lines), "cases": len(lines)}}
    return replace(record, verdict="fail", failed_check="bench", cause=cause, message=message, checks=checks)
