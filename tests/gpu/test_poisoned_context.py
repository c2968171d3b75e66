"""A kernel that loses the CUDA context fails its own test, and every other test still runs and reports."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.gpu

_TESTS = """
import torch, triton, triton.language as tl
from pytest_fusion import fused_equivalent, tensor

@triton.jit
def _add(x, y, o, n, BLOCK: tl.constexpr, BUG: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    a = tl.load(x + i, mask=m, other=0.0) + tl.load(y + i, mask=m, other=0.0)
    if BUG == 1:
        tl.store(o + i.to(tl.int64) * 1000000007 + 1000000000000, a, mask=m)
    if BUG == 2:
        a = a * 1.01
    if BUG == 3:
        tl.device_assert(n < 0, "planted")
    tl.store(o + i, a, mask=m)

def add(x, y, bug):
    x, y = x.contiguous(), y.contiguous()
    o = torch.empty_like(x)
    if x.numel():
        more = {"debug": True} if bug == 3 else {}
        _add[(triton.cdiv(x.numel(), 64),)](x, y, o, x.numel(), BLOCK=64, BUG=bug, **more)
    return o

def reference(x, y):
    return x + y

SPEC = {"inputs": {"x": tensor("rows cols"), "y": tensor("rows cols")}}

@fused_equivalent(reference, **SPEC)
def test_healthy(x, y):
    return add(x, y, 0)

@fused_equivalent(reference, **SPEC)
def test_illegal_access(x, y):
    return add(x, y, 1)

@fused_equivalent(reference, **SPEC)
def test_device_assert(x, y):
    return add(x, y, 3)

@fused_equivalent(reference, **SPEC)
def test_wrong(x, y):
    return add(x, y, 2)

@fused_equivalent(reference, **SPEC)
def test_healthy_too(x, y):
    return add(x, y, 0)
"""


def test_other_tests_go_on(pytester: pytest.Pytester) -> None:
    """An illegal access and a device assert fail as `crash` with their cases; two healthy tests beside them pass."""
    pytester.makepyfile(_TESTS)
    result = pytester.runpytest_subprocess("--fusion-device=cuda", "--fusion-seconds=2", "--fusion-json=out.json")

    assert result.ret == 1
    result.assert_outcomes(passed=2, failed=3)
    tests = json.loads((pytester.path / "out.json").read_text())["tests"]
    found = {test["nodeid"].partition("::")[2]: test for test in tests}
    assert found["test_illegal_access"]["failed_check"] == "crash"
    assert found["test_device_assert"]["failed_check"] == "crash"
    assert found["test_illegal_access"]["case"]["dims"]
    assert found["test_wrong"]["failed_check"] == "values"


_REFERENCE = """
import torch, triton, triton.language as tl
from pytest_fusion import fused_equivalent, tensor

@triton.jit
def _far(x):
    tl.store(x + 1000000000000, 1.0)

def reference(x):
    _far[(1,)](x)
    return x * 2

@fused_equivalent(reference, inputs={"x": tensor("rows cols")})
def test_right(x):
    return x * 2

@fused_equivalent(lambda x: x * 2, inputs={"x": tensor("rows cols")})
def test_beside_it(x):
    return x * 2
"""


def test_a_reference_that_crashes_does_not_accuse_the_kernel(pytester: pytest.Pytester) -> None:
    """The test is an error that says whose doing it was, and the next test has a context again."""
    pytester.makepyfile(_REFERENCE)
    result = pytester.runpytest_subprocess("--fusion-device=cuda", "--fusion-seconds=2", "--fusion-json=out.json")

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*the reference itself lost the CUDA context*"])
    result.stdout.no_fnmatch_line("*crash failed*")
