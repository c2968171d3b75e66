"""The fixture ``fusion_bench`` on a GPU: real launches, and a latency by replayed graphs."""

from __future__ import annotations

import json
import sys

import pytest

pytestmark = pytest.mark.gpu

_TEST = """
import torch

def reference(x):
    return torch.exp(x) + 1

def test_it(fusion_bench):
    x = torch.randn(512, 1024, device="cuda")[:, ::2]
    fusion_bench(lambda x: torch.exp(x) + 1, reference, x, case="equal")

def test_wrong(fusion_bench):
    fusion_bench(lambda x: torch.exp(x) + 2, reference, torch.randn(512, 512, device="cuda"))
"""


def test_any_two_calls_are_counted_and_timed(pytester: pytest.Pytester) -> None:
    """Nodes of a graph are the launches, the raw seconds are kept, and a wrong result has no numbers."""
    pytester.makepyfile(test_it=_TEST)
    result = pytester.run(
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--fusion-device", "cuda", "--fusion-bench",
        "--fusion-json", "fusion.json",
    )  # fmt: skip

    result.assert_outcomes(passed=1, failed=1)
    tests = {
        t["nodeid"].partition("::")[2]: t for t in json.loads((pytester.path / "fusion.json").read_text())["tests"]
    }
    assert tests["test_wrong"]["bench"] == {}
    fused, reference = tests["test_it"]["bench"]["rows"]
    assert (fused["case"], fused["role"], reference["role"]) == ("equal", "fused", "reference")
    assert fused["facts"]["launches.kernels"] == reference["facts"]["launches.kernels"] == 2
    assert fused["methods"] == {"launches": "graph"}
    assert fused["latency"]["method"]["timer"] == "graph"
    assert len(fused["samples"]["fused"]) == len(fused["samples"]["reference"]) == 5 * len(fused["latency"]["blocks"])
    assert fused["latency"]["place"]["gpu"] in fused["device"]
