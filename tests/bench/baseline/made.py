"""Rows and baselines for the tests of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_fusion.bench.baseline.codec import Baseline
from pytest_fusion.bench.baseline.row import GoldenOutput, Latency, Row
from pytest_fusion.bench.baseline.store import path_of

TEST = "tests/test_norm.py::test_rms[bf16]"
H200 = "NVIDIA H200 (sm_90)"
PLACE = {"gpu": "NVIDIA H200", "capability": "9.0", "driver": "580", "torch": "2.11", "triton": "3.6"}
FACTS = {"launches.kernels": 1, "launches.memcpy": 0, "bytes.algorithmic": 4096, "sm_90/rms/spills": 0, "recompiles": 2}
BLOCKS = tuple(-0.7 + 0.0002 * (i % 5 - 2) for i in range(20))


def latency(ratio: float = -0.7, **changes: Any) -> Latency:
    made = Latency(
        fused_s=5e-5,
        reference_s=1e-4,
        ratio=ratio,
        low=ratio - 0.0005,
        high=ratio + 0.0005,
        error=0.0002,
        blocks=BLOCKS,
        method={"timer": "graph", "cache": "cold"},
        control="abc",
        aa=0.0005,
        place=PLACE,
        unit="u1",
    )
    return replace(made, **changes)


def golden(**changes: Any) -> GoldenOutput:
    made = GoldenOutput("out", "float32", (2, 2), "sha256:aa", (1.0, 2.0, 3.0, 4.0), (1e-6,) * 4, 2.5, 1e-6)
    return replace(made, **changes)


def row(facts: Mapping[str, int] = FACTS, **changes: Any) -> Row:
    made = Row(
        test=TEST,
        case="rows=8 hidden=16 bfloat16",
        role="fused",
        device=H200,
        facts=facts,
        names={"rms": 1},
        methods={"launches": "graph"},
        environment={"torch": "2.11.0", "triton": "3.6.0"},
        made="2026-11-22T04:00:00Z",
    )
    return replace(made, **changes)


def baseline(*rows: Row) -> Baseline:
    return Baseline(rows[0].test, rows[0].device, {one.key: one for one in rows})


def file_of(folder: Path, one: Row) -> Path:
    return path_of(folder, one.test, one.device)
