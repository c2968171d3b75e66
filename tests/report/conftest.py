"""Records as real runs make them, for every report to show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_fusion.report.record import TestRecord

Make = Callable[..., TestRecord]


def _check(verdict: str, cases: int, reason: str = "", **evidence: Any) -> dict[str, Any]:
    return {"verdict": verdict, "reason": reason, "cases": cases, **evidence}


@pytest.fixture
def passing() -> Make:
    """A solid pass; keywords replace fields."""

    def make(**changes: Any) -> TestRecord:
        fields: dict[str, Any] = {
            "nodeid": "tests/test_norm.py::test_rms_norm",
            "verdict": "pass",
            "cases": 131,
            "rejected": {"too-expensive": 4, "ValueError": 2},
            "checks": {
                "values": _check("pass", 131, ratio=0.41),
                "bounds": _check("pass", 131),
                "device": _check("unknown", 0, "no second GPU on this machine"),
            },
            "seconds": 7.26,
            "coverage": {"pairs": 412, "covered": 412, "share": 1.0},
            "worst": {"ratio": 0.41, "output": "out", "statistic": "rms", "case": None},
            "grade": "A",
            "phases": {"fused": 3.1, "reference": 2.2, "make": 0.4, "judge": 1.2, "plugin": 0.36},
        }
        given = {**fields, **changes}
        return TestRecord(**{"judged": given["cases"], **given})

    return make


@pytest.fixture
def failing() -> Make:
    """A tail-mask bug with its smallest case, error map and replay file; keywords replace fields."""

    def make(**changes: Any) -> TestRecord:
        cells = [[0.25] * 15 + [2380.0 if row % 2 else 40.0] for row in range(6)]
        axes = ["every index", "index 128 of 129 (the last)"]
        wrong = {
            "cells": cells,
            "scale": "error over allowed",
            "shape": [6, 129],
            "count": 2,
            "total": 258,
            "axes": axes,
            "caption": "errors of out",
        }
        fields: dict[str, Any] = {
            "nodeid": "tests/test_softmax.py::test_softmax[causal]",
            "verdict": "fail",
            "cases": 23,
            "failed_check": "values",
            "cause": "tail-mask",
            "case": {
                "dims": {"rows": 2, "hidden": 129},
                "dtype": "float16",
                "inputs": {
                    "x": {"dtype": "float16", "layout": "padded", "variant": 0, "offset": 3, "values": "unit"},
                    "mask": {"dtype": "bool", "layout": "contiguous", "variant": 0, "offset": 0, "values": "booleans"},
                },
                "absent": [],
                "drawn": {"scale": 0.125},
                "seed": 77,
                "text": "rows=2 hidden=129; x float16 padded offset 3; mask bool; scale=0.125",
            },
            "replay": ".fusion/failures/causal.json",
            "message": "values: 2 of 258 elements are wrong\n\n  got      0.0317\n  expected 0.0079 +- 0.00001\n",
            "checks": {
                "error": _check("pass", 23),
                "values": _check(
                    "fail", 23, "element [1, 128] is 2,380 times further off than allowed", ratio=2380.0,
                    error_map=wrong,
                ),
            },
            "seconds": 1.83,
            "coverage": {"pairs": 412, "covered": 301, "share": 0.7306},
            "worst": {"ratio": 2380.0, "output": "out", "statistic": "max", "case": None},
        }  # fmt: skip
        return TestRecord(**{**fields, **changes})

    return make


@pytest.fixture
def environment() -> dict[str, Any]:
    return {
        "lane": "cpu-interpreter",
        "device": "cpu",
        "device_name": "Some Processor @ 2.1 GHz",
        "python": "3.11.7",
        "torch": "2.13.0+cpu",
        "triton": "3.7.1",
        "cuda": None,
    }
