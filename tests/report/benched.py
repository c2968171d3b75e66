"""Records of a bench as runs on a GPU and without one make them, for every report to show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_fusion.bench.baseline.row import Latency, Row
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run.measure.timing.roofline import Activity

COPY, MATMUL = 4.0e12, 8.0e14
NODEID = "tests/test_norm.py::test_rms_norm"


def latency(fused_s: float, reference_s: float, **changes: Any) -> Latency:
    ratio = math.log(fused_s / reference_s)
    fields: dict[str, Any] = {
        "fused_s": fused_s,
        "reference_s": reference_s,
        "ratio": ratio,
        "low": ratio - 0.01,
        "high": ratio + 0.01,
        "error": 0.003,
        "blocks": (ratio,) * 20,
        "method": {"timer": "graph", "cache": "cold", "warm-up": "steady"},
        "aa": 0.001,
    }
    return Latency(**{**fields, **changes})


def rows(
    case: str = "rows=8192 hidden=8192 bfloat16",
    moved: int = 268_451_840,
    *,
    test: str = NODEID,
    fused_s: float | None = 73.8e-6,
    reference_s: float = 506e-6,
    fused: Mapping[str, Any] | None = None,
    reference: Mapping[str, Any] | None = None,
    phase: str = "",
) -> list[Row]:
    """A fused row and its reference's; without ``fused_s`` as a machine without a GPU makes them."""
    on_gpu = fused_s is not None
    shared: dict[str, Any] = {"test": test, "case": case, "device": "NVIDIA H200" if on_gpu else "cpu-interpreter"}
    how = {"launches": "graph" if on_gpu else "modelled"}
    ours: dict[str, Any] = {
        "facts": {"bytes.algorithmic": moved, "launches.kernels": 1, "launches.memcpy": 0, "launches.memset": 0},
        "methods": how,
    }
    theirs: dict[str, Any] = {
        "facts": {"bytes.moved": 6 * moved, "launches.kernels": 9, "work.flops": 0, "work.operations": 6},
        "methods": how,
    }
    if fused_s is not None:
        ours["latency"] = latency(fused_s, reference_s)
        ours["facts"] |= {"memory.peak": moved // 2, "memory.retained": 0}
        theirs["facts"] |= {"memory.peak": 2 * moved, "memory.retained": 0}
        ours["measures"] = {
            "host_s": 21e-6,
            "span_s": fused_s,
            "busy_s": fused_s,
            "copy_bytes_per_s": COPY,
            "matmul_flops_per_s": MATMUL,
        }
        ours["timeline"] = (Activity("rms_norm_kernel", "kernel", 0.0, fused_s),)
        theirs["timeline"] = chain(["to", "pow", "mean", "add", "rsqrt", "mul", "to", "mul", "copy"], reference_s)
    tail = f" {phase}" if phase else ""
    return [
        Row(role=f"fused{tail}", **shared, **_merged(ours, fused)),
        Row(role=f"reference{tail}", **shared, **_merged(theirs, reference)),
    ]


def chain(names: Sequence[str], seconds: float) -> tuple[Activity, ...]:
    """Kernels one after the other with a gap after each."""
    step = seconds / len(names)
    return tuple(Activity(f"{name}_kernel", "kernel", at * step, 0.8 * step) for at, name in enumerate(names))


def sweep(sizes: Sequence[int] = (256, 1024, 4096, 16384), **more: Any) -> list[Row]:
    """Cases of growing size: small ones take a fixed time, large ones what their bytes take."""
    found: list[Row] = []
    for size in sizes:
        moved = 4 * size * 8192
        text = f"rows={size} hidden=8192 bfloat16"
        floor, flow = 2.3e-6, moved / (0.91 * COPY)
        found += rows(text, moved, fused_s=floor + flow, reference_s=20e-6 + 6 * flow, **more)
    return found


def record(found: Sequence[Row], nodeid: str = NODEID, **bench: Any) -> TestRecord:
    data = {"rows": [row.as_json() for row in found], "compared": [], "resources": [], "notes": [], "complete": True}
    return TestRecord(nodeid=nodeid, verdict="pass", cases=131, judged=131, bench={**data, **bench})


def _merged(own: dict[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any]:
    """``changes`` over ``own``, mappings key by key; ``None`` takes a key out."""
    for name, value in (changes or {}).items():
        if value is None:
            own.pop(name, None)
        elif isinstance(value, Mapping) and name != "latency":
            own[name] = {key: item for key, item in {**own.get(name, {}), **value}.items() if item is not None}
        else:
            own[name] = value
    return own
