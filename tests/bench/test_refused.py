"""A kernel that a compiler refuses is no pass of a bench run, with a committed baseline or without."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fusion.bench.baseline import store
from pytest_fusion.bench.baseline.row import Row
from pytest_fusion.bench.bench_request import BenchRequest
from pytest_fusion.bench.measured import Measured, beside_baseline
from pytest_fusion.run.measure.resources.targets import Resources, Status

CASE = "n=64 float32"


def compiled(**statuses: Status) -> Measured:
    reason = "unsupported AST node type: Break"
    kernels = [Resources("row", target, status, reason, "k.py", 8) for target, status in statuses.items()]
    return Measured(resources=[(CASE, one) for one in kernels])


def refused(found: Measured, folder: Path) -> list[str]:
    return beside_baseline(found, BenchRequest(folder=folder), "t.py::test_row", {"lane": "cpu"}, None).refused


def test_what_is_refused_everywhere_has_its_line(tmp_path: Path) -> None:
    """For each target, with file and line."""
    assert refused(compiled(sm_80="refused", sm_90="refused"), tmp_path) == [
        f"{CASE}: row for {target} (k.py:8): unsupported AST node type: Break" for target in ("sm_80", "sm_90")
    ]


def test_a_kernel_for_newer_targets_passes(tmp_path: Path) -> None:
    """What one target refuses, or says nothing of, another one may run."""
    assert refused(compiled(sm_80="refused", sm_90="compiled"), tmp_path) == []
    assert refused(compiled(sm_80="refused", sm_90="unknown"), tmp_path) == []


def test_what_the_baseline_was_compiled_for_is_refused_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline has figures of the kernel on that target."""
    row = Row(test="t.py::test_row", case=CASE, role="fused", device="cpu", facts={"sm_80/row/registers": 32})
    monkeypatch.setattr(store, "load", lambda *_: type("Stored", (), {"rows": {row.key: row}})())
    (found,) = refused(compiled(sm_80="refused", sm_90="compiled"), tmp_path)
    assert "row for sm_80 (k.py:8)" in found
