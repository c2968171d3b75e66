"""Offsets beyond 2^31 elements where the memory is a GPU's: 8 GB and more for a few elements."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.gpu

_TESTS = """
import torch, triton, triton.language as tl
from pytest_fusion import fused_equivalent, tensor

@triton.jit
def _scale(x, out, n, row, column, into, beside, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    pid, i = tl.program_id(0), tl.arange(0, BLOCK)
    if WIDE == 0:
        at, to = pid * row + i * column, pid * into + i * beside
    elif WIDE == 1:
        at, to = (pid * row).to(tl.int64) + (i * column).to(tl.int64), (pid * into).to(tl.int64) + i * beside
    else:
        at = pid.to(tl.int64) * row + i.to(tl.int64) * column
        to = pid.to(tl.int64) * into + i.to(tl.int64) * beside
    tl.store(out + to, tl.load(x + at, mask=i < n, other=0.0) * 2, mask=i < n)

def scale(x, out, wide):
    if x.numel():
        block = triton.next_power_of_2(x.shape[1])
        _scale[(x.shape[0],)](x, out, x.shape[1], *x.stride(), *out.stride(), WIDE=wide, BLOCK=block)
    return out

def doubled(x):
    return 2 * x

def doubled_(x):
    x.mul_(2)

SPEC = {"inputs": {"x": tensor("rows hidden")}, "dtypes": torch.float16}

@fused_equivalent(doubled, **SPEC)
def test_narrow(x):
    return scale(x, torch.empty(x.shape, dtype=x.dtype, device=x.device), 0)

@fused_equivalent(doubled, **SPEC)
def test_widened_too_late(x):
    return scale(x, torch.empty(x.shape, dtype=x.dtype, device=x.device), 1)

@fused_equivalent(doubled, **SPEC)
def test_wide(x):
    return scale(x, torch.empty(x.shape, dtype=x.dtype, device=x.device), 2)

@fused_equivalent(doubled_, mutates="x", **SPEC)
def test_narrow_in_place(x):
    scale(x, x, 0)

@fused_equivalent(doubled_, mutates="x", **SPEC)
def test_wide_in_place(x):
    scale(x, x, 2)
"""


def test_overflows_are_found(pytester: pytest.Pytester) -> None:
    """Offsets in 32 bits fail with their cause, whether as a crash or as a wrong value; those in 64 pass."""
    pytester.makepyfile(_TESTS)
    result = pytester.runpytest_subprocess("--fusion-device=cuda", "--fusion-profile=large", "--fusion-json=out.json")

    result.assert_outcomes(passed=2, failed=3)
    tests = json.loads((pytester.path / "out.json").read_text())["tests"]
    found = {test["nodeid"].partition("::")[2]: test for test in tests}
    assert {name: test["verdict"] for name, test in found.items()} == {
        "test_narrow": "fail",
        "test_widened_too_late": "fail",
        "test_wide": "pass",
        "test_narrow_in_place": "fail",
        "test_wide_in_place": "pass",
    }
    for name in ("test_narrow", "test_widened_too_late", "test_narrow_in_place"):
        assert found[name]["cause"] == "int32-overflow", found[name]["message"]
    assert found["test_wide"]["cases"] >= 4
    assert not found["test_wide"]["rejected"]
