"""`--fusion-sanitize`: the smallest cases of a test again under compute-sanitizer, each tool in its own process.

There each tensor is an allocation of exactly its own bytes, because memcheck accepts every access in a guarded block.
Reports of memcheck and synccheck are failures. Those of initcheck and racecheck are `unknown`, with the line: a value
that is read and dropped does no harm, and racecheck does not follow all barriers of compiled Triton.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pytest_fusion.case import counter_random
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.case.describe import describe
from pytest_fusion.case.layouts import geometry
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.case.plan import build, make_plan
from pytest_fusion.checks.verdict import failed
from pytest_fusion.diagnosis.diagnose import UNEXPLAINED
from pytest_fusion.diagnosis.diagnosis_model import Diagnosis
from pytest_fusion.diagnosis.text.message import compose
from pytest_fusion.engine.cases import limits_of
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.request import Request
from pytest_fusion.engine.tally import Tally
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run.measure.tools import sanitizer
from pytest_fusion.run.measure.tools.again import Again, ended, environment
from pytest_fusion.run.measure.tools.sanitizer import MARK, Report
from pytest_fusion.run.placing import write
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import plural

# Names the file of cases that the sanitized process runs instead of its tests' own.
VARIABLE = "PYTEST_FUSION_BARE"
# In the caching allocator's blocks the end of one tensor is the beginning of another.
_ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_DISABLE_LINE_INFO": "0"}
_MOST_CASES = 3
_SIZES = (5, 33, 2)
_SECONDS = 600.0
_CHECKS = {"memcheck": "bounds", "synccheck": "repeat", "initcheck": "unwritten", "racecheck": "repeat"}
_CERTAIN = ("memcheck", "synccheck")


@dataclass(frozen=True, slots=True)
class Run:
    """The reports of one tool on some cases; ``problem`` says why it could not run."""

    tool: str
    cases: int = 0
    reports: tuple[Report, ...] = ()
    problem: str = ""


def sanitized(spec: FusionSpec, request: Request, tally: Tally, record: TestRecord) -> TestRecord:
    """The record with the sanitizer's result: a failure, an `unknown`, or a note of what ran."""
    if request.device == "cpu":
        return _noted(
            record, "not sanitized: compute-sanitizer needs a GPU; the CPU lane checks every access by itself"
        )
    executable = sanitizer.find()
    if executable is None:
        return _noted(record, f"not sanitized: {sanitizer.INSTALL}")
    cases = list(smallest(spec, request, tally))
    if not cases:
        return _noted(record, "not sanitized: the spec has no small case")
    # Each loads torch under the tool, for 20 s and more: side by side.
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda tool: _under(executable, tool, request, cases), sanitizer.TOOLS))
    return folded(spec, record, cases, runs)


def smallest(spec: FusionSpec, request: Request, tally: Tally) -> Iterator[Case]:
    """The failing case, where there is one, and a few small ones: of odd sizes, contiguous and padded."""
    count = 0
    if tally.failure is not None and tally.failure.case is not None:
        count += 1
        yield tally.failure.case
    limits = limits_of(request.profile, torch.device(request.device))
    plan = make_plan(spec, pools=searching.pools(spec, 0), limits=limits)
    known: set[str] = set()
    for turn, size in enumerate(_SIZES):
        choice: dict[str, Any] = {f"dim {name}": size + i for i, name in enumerate(spec.sized)}
        for factor, levels in plan.factors.items():
            if factor.startswith("layout ") and turn == 1 and ("padded", 0) in levels:
                choice[factor] = ("padded", 0)
        try:
            case = build(plan, choice, counter_random.mix("sanitize", turn) >> 33)
        except ImpossibleCase:
            continue
        key = case.with_(seed=0).key()
        if key in known or count == _MOST_CASES:
            continue
        known.add(key)
        count += 1
        yield case


def _under(executable: str, tool: str, request: Request, cases: list[Case]) -> Run:
    """One tool on the test, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="fusion-sanitize-") as folder:
        path = Path(folder) / "cases.json"
        path.write_text(json.dumps([case.as_json() for case in cases]), encoding="utf-8")
        program = Again(request.shown or request.nodeid, request.start, request.device).program(Path(folder))
        try:
            done = ended(
                sanitizer.command(executable, tool, program),
                start=request.start,
                env=environment(**{VARIABLE: str(path)}, **_ALONE),
                seconds=_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return Run(tool, problem=f"{tool} did not end within {_SECONDS:g} s")
        except OSError as error:
            return Run(tool, problem=f"{tool} could not be started: {error}")
        reports = tuple(sanitizer.parse(tool, done.output))
        counted = path.with_suffix(".ran")
        ran = len(counted.read_text(encoding="utf-8").split()) if counted.exists() else 0
        if ran or reports:
            return Run(tool, max(ran, 1), reports)
        return Run(tool, problem=f"{tool} ran no case (exit {done.code}): {done.last_line}")


def folded(spec: FusionSpec, record: TestRecord, cases: list[Case], runs: list[Run]) -> TestRecord:
    """The record with the runs: the first certain report fails it, others make their check `unknown`."""
    notes, checks = list(record.notes), dict(record.checks)
    tried = [run.tool for run in runs if run.cases]
    if tried:
        notes.append(f"compute-sanitizer {', '.join(tried)} ran {plural(max(run.cases for run in runs), 'case')}")
    notes += [f"not sanitized: {run.problem}" for run in runs if run.problem]
    failure: Report | None = None
    for run in runs:
        for report in run.reports:
            certain = run.tool in _CERTAIN and not report.mild
            check = _CHECKS[run.tool]
            if not (report.own or run.tool == "memcheck") or check in record.off:
                continue
            notes.append(str(report))
            if certain:
                failure = failure or report
            elif checks.get(check, {}).get("verdict") == "pass":
                checks[check] = {**checks[check], "verdict": "unknown", "reason": _doubt(report)}
    if failure is None or record.verdict == "fail":
        return replace(record, notes=notes, checks=checks)
    return _failed(spec, replace(record, notes=notes, checks=checks), failure, cases)


def _doubt(report: Report) -> str:
    if report.tool == "initcheck":
        return f"{report}; no result depended on it in any case"
    return f"{report}; racecheck does not follow every barrier of compiled Triton, and no result varied"


def _failed(spec: FusionSpec, record: TestRecord, report: Report, cases: list[Case]) -> TestRecord:
    check = _CHECKS[report.tool]
    evidence = {name: getattr(report, name) for name in ("tool", "kernel", "file", "line", "thread", "block")}
    evidence["details"] = list(report.details)
    verdict = failed(check, f"compute-sanitizer {report}", identity=f"{check}:{report.tool}:{report.where}", **evidence)
    described = describe(spec, cases[report.case]) if 0 <= report.case < len(cases) else None
    cause = UNEXPLAINED
    if report.tool == "memcheck":
        misaligned = "misaligned" in f"{report.what} {' '.join(report.details)}".lower()
        cause = "misaligned-access" if misaligned else "out-of-bounds"
    diagnosis = Diagnosis(cause, [f"{report.tool} saw it happen, in {report.kernel or 'an unnamed kernel'}"])
    entry = {"verdict": "fail", "reason": verdict.reason, "cases": record.checks.get(check, {}).get("cases", 0)}
    again = f"pytest {record.nodeid} --fusion-sanitize"
    return replace(
        record,
        verdict="fail",
        failed_check=check,
        cause=cause,
        diagnosis=diagnosis.as_json(),
        case=described,
        checks={**record.checks, check: {**entry, **evidence}},
        message=compose(spec.name, verdict, described, diagnosis=diagnosis, command=again),
    )


@dataclass(frozen=True, slots=True)
class Sanitized:
    """The mode in the sanitized process: call the kernel on each case of ``file`` in its own memory, unchecked."""

    file: Path

    def run(self, job: Job) -> TestRecord:
        """Call the kernel once for each case and count the calls in a file beside ``file``."""
        cases = [Case.from_json(data) for data in json.loads(self.file.read_text(encoding="utf-8"))]
        spec, device, ran = job.spec, torch.device(job.request.device), self.file.with_suffix(".ran")
        for number, case in enumerate(cases):
            sys.stdout.write(f"\n{MARK} {number}\n")
            sys.stdout.flush()
            try:
                logical = make_inputs(spec, case, device)
                arguments = {name: _own(value, case, name) for name, value in logical.items()}
                spec.fused(**arguments, **job.extra)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            except (ImpossibleCase, InputFailed):
                continue
            except Exception as error:  # noqa: BLE001 - the sanitizer ends the context of a kernel that it caught
                sys.stdout.write(f"{type(error).__name__}: {error}\n")
            with ran.open("a", encoding="utf-8") as stream:
                stream.write(f"{number}\n")
        return TestRecord(job.request.nodeid, "pass", cases=len(cases))


def _own(value: Any, case: Case, name: str) -> Any:
    """A tensor in an allocation of exactly the bytes that its layout has; anything else as it is."""
    if not isinstance(value, torch.Tensor) or name not in case.tensors:
        return value
    plan = geometry(tuple(value.shape), case.tensors[name].layout)
    storage = torch.empty(plan.storage, dtype=value.dtype, device=value.device)
    target = storage.as_strided(plan.shape, plan.strides, plan.offset)
    write(target, value)
    return target


def _noted(record: TestRecord, note: str) -> TestRecord:
    return replace(record, notes=[*record.notes, note])
