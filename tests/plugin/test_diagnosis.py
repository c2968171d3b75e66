"""A diagnosis of a whole test: in its record, and never at the finding's expense."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion import FusionSpec, tensor
from pytest_fusion.case.choosing import search
from pytest_fusion.engine import minimum
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.modes import Judge
from pytest_fusion.engine.request import Request
from pytest_fusion.report.record import TestRecord

T = torch.Tensor


def examine(fused: Any, tmp_path: Path, *, isolate: str) -> TestRecord:
    def outer() -> None: ...

    search.adopt(outer, outer)
    spec = FusionSpec(fused=fused, reference=lambda x: x * 2, inputs={"x": tensor("rows hidden")}, dtypes="float32")
    request = Request("test", isolate=isolate, root=tmp_path, seed=0, max_cases=30, first=True)
    return Judge().run(Job(spec, request, outer, {}))


def test_the_record_has_cause_evidence_and_what_was_ruled_out(tmp_path: Path) -> None:
    """The same in the record's field, in its message, and in what is written as JSON."""

    def fused(x: T) -> T:
        return x * 2 if x.is_contiguous() else torch.zeros(x.shape)

    record = examine(fused, tmp_path, isolate="off")
    assert record.cause == record.diagnosis["cause"]
    assert record.cause in ("ignores-strides", "needs-alignment")
    assert set(record.as_json()["diagnosis"]) == {"cause", "evidence", "ruled_out", "runs"}
    assert all(sentence in record.message for sentence in record.diagnosis["evidence"])
    assert record.diagnosis["evidence"]


def test_a_passing_record_has_no_diagnosis(tmp_path: Path) -> None:
    """Nothing failed, nothing is explained."""
    record = examine(lambda x: x * 2, tmp_path, isolate="off")
    assert (record.verdict, record.diagnosis) == ("pass", {})


def test_an_experiment_that_kills_the_child_leaves_the_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failing check, its case and its reason stay; the cause is what the verdict alone says."""

    def deadly(lab: Any) -> Any:
        lab._note(lab.base)
        os._exit(3)

    monkeypatch.setattr(minimum, "diagnose", deadly)
    record = examine(lambda x: x + x.numel(), tmp_path, isolate="on")
    assert (record.verdict, record.failed_check, record.cause) == ("fail", "values", "unexplained")
    assert record.case is not None
    assert record.case["dims"] == {"rows": 1, "hidden": 1}
    assert "an experiment on it ended the process" in record.message
