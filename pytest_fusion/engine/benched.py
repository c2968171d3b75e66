"""What ``bench=`` names, measured behind a green test, in the record of that test."""

from __future__ import annotations

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

    record = replace(record, bench=found.as_json() if found.rows or found.notes else {})
    if found.wrong or found.refused:
        listed = "\n".join(f"  {one}" for one in found.wrong or found.refused)
        why = "it is wrong at sizes of bench=, and is not measured there" if found.wrong else "it does not compile"
        cause = None if found.wrong else "does-not-compile"
        message = f"{name}: bench failed: {why}\n{listed}"
        return replace(record, verdict="fail", failed_check="bench", cause=cause, message=message)
    # A new baseline accepts what regressed; it is no answer to a limit.
    accepted = wanted.update in ("regressed", "all")
    failures = [one for one in found.failures if not accepted or one in found.limits]
    if not failures:
        return record
    listed = "\n".join(f"  {failure_line(one)}" for one in failures)
    only_limits = all(one in found.limits for one in failures)
    accept = "change bench_limits=" if only_limits else "accept it with --fusion-update regressed"
    # Where a baseline is missing, it says by itself how to make one.
    missing = all(getattr(one, "verdict", "") == "missing" for one in failures)
    advice = "" if missing else f"\n  {accept}, or fix the kernel"
    message = f"{name}: bench failed\n{listed}{advice}"
    return replace(record, verdict="fail", failed_check="bench", cause=None, message=message)
