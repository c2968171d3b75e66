"""`Tally`: what the cases of one test added up to; plain data, sent out of the child that ran them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.describe import describe
from pytest_fusion.checks.verdict import Deviation, Verdict
from pytest_fusion.diagnosis.causes import likely_cause
from pytest_fusion.diagnosis.diagnose import UNEXPLAINED
from pytest_fusion.diagnosis.diagnosis_model import Diagnosis
from pytest_fusion.spec.fusion_spec import FusionSpec

_WORSE = {"pass": 0, "hazard": 1, "unknown": 2, "fail": 3}


@dataclass(frozen=True, slots=True)
class Failure:
    """A finding: a failure or a hazard, on the smallest case found."""

    verdict: Verdict
    case: Case | None
    described: dict[str, Any] | None = None
    map: dict[str, Any] | None = None
    trace: str = ""
    shrink_runs: int = 0
    # A second case and its map, where all sizes of the smallest are too small to show a place.
    larger: tuple[dict[str, Any], dict[str, Any]] | None = None
    # The number of the case that showed it first.
    position: int = 0
    diagnosis: Diagnosis | None = None

    @property
    def explained(self) -> Diagnosis:
        """The diagnosis; without one, what the verdict stands for by itself."""
        found = self.verdict
        because = [found.because] if found.code and found.because else []
        return self.diagnosis or Diagnosis(found.code or likely_cause(found) or UNEXPLAINED, because)

    @property
    def code(self) -> str:
        """The slug of what was found: a hazard's code, else the cause."""
        return self.explained.cause


@dataclass(slots=True)
class Tally:
    """Counts of cases and of each check's verdicts, the worst error, and the failure."""

    cases: int = 0
    judged: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    coverage: dict[str, Any] = field(default_factory=dict)
    worst: dict[str, Any] = field(default_factory=dict)
    grade: str | None = None
    phases: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    statistics: dict[str, Any] | None = None
    # The worst finding that fails the test, and all others, worst first.
    failure: Failure | None = None
    others: list[Failure] = field(default_factory=list)
    # Failures seen only where another had already spoiled the result, as sentences.
    behind: list[str] = field(default_factory=list)
    # CPU seconds of the search for others after the first failure.
    more_s: float = 0.0
    imported: tuple[str, ...] = ()
    # Why passing is no evidence about the kernel.
    empty: str = ""
    # The pinned replay that failed, as its file is shown.
    pinned: str | None = None

    @property
    def findings(self) -> list[Failure]:
        """All findings, worst first."""
        return [*([self.failure] if self.failure is not None else []), *self.others]

    def reject(self, kind: str) -> None:
        """One more rejection, one of those in ``checks.verdict`` or the name of what was raised."""
        self.rejected[kind] = self.rejected.get(kind, 0) + 1

    def judge(self, spec: FusionSpec, case: Case, verdicts: Iterable[Verdict]) -> None:
        """Count a judged case, once for each check, with the worst of the check's conclusions on it."""
        self.judged += 1
        once: dict[str, Verdict] = {}
        for verdict in verdicts:
            if verdict.check not in once or _WORSE[verdict.status] > _WORSE[once[verdict.check].status]:
                once[verdict.check] = verdict
        for verdict in once.values():
            self._count(verdict)
            if verdict.check == "values" and not verdict.failed:
                self._measure(spec, case, verdict)

    def _count(self, verdict: Verdict) -> None:
        entry = self.checks.setdefault(verdict.check, {"verdict": "pass", "cases": 0, "reason": ""})
        entry["cases"] += 1
        if verdict.status == "hazard":
            entry["reason"] = entry["reason"] or verdict.reason
        elif verdict.status != "pass" and entry["verdict"] == "pass":
            entry.update(verdict=verdict.status, reason=verdict.reason)

    def _measure(self, spec: FusionSpec, case: Case, verdict: Verdict) -> None:
        """Record the error of correct values."""
        seen = verdict.evidence
        if not isinstance(seen, Deviation):
            return
        if seen.grade is not None:
            self.grade = max(self.grade or "A", seen.grade)
        if seen.ratio > self.worst.get("ratio", -1.0):
            self.worst = {
                "ratio": seen.ratio,
                "output": verdict.output,
                "statistic": seen.statistic,
                "case": describe(spec, case)["text"],
            }
