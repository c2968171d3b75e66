"""`--fusion-sanitize` with the real tool, where it is installed."""

from __future__ import annotations

import json

import pytest

from pytest_fusion.run.measure.tools import sanitizer

pytestmark = pytest.mark.gpu

_TESTS = """
import torch, triton, triton.language as tl
from hypothesis import settings
from pytest_fusion import dim, fused_equivalent, tensor

@triton.jit
def _double(x, out, n, OVER: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n + OVER, other=0.0)
    tl.store(out + i, value * 2, mask=i < n)

def launch(x, over):
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _double[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), OVER=over, BLOCK=128)
    return out

SPEC = {"inputs": {"x": tensor("rows hidden", layouts="contiguous")}, "dtypes": torch.float32}
few = settings(max_examples=10, deadline=None)

@few
@fused_equivalent(lambda x: 2 * x, **SPEC)
def test_right(x):
    return launch(x, 0)

@few
@fused_equivalent(lambda x: 2 * x, **SPEC)
def test_reads_past_the_end(x):
    return launch(x, 100)
"""


def test_a_read_that_changes_nothing_is_found(pytester: pytest.Pytester) -> None:
    """A load past the end whose value is dropped passes every comparison; memcheck names its line."""
    pytester.makepyfile(_TESTS)
    result = pytester.runpytest_subprocess("--fusion-device=cuda", "--fusion-sanitize", "--fusion-json=out.json")
    tests = json.loads((pytester.path / "out.json").read_text())["tests"]
    right, wrong = tests
    assert right["verdict"] == "pass", right["message"]
    if sanitizer.find() is None:
        result.assert_outcomes(passed=2)
        assert any("compute-sanitizer was not found" in note for note in right["notes"])
        return
    assert any(note.startswith("compute-sanitizer memcheck") for note in right["notes"]), right["notes"]
    assert (wrong["verdict"], wrong["failed_check"], wrong["cause"]) == ("fail", "bounds", "out-of-bounds")
    assert wrong["checks"]["bounds"]["kernel"] == "_double"
    assert wrong["checks"]["bounds"]["line"] == 8, wrong["checks"]["bounds"]
