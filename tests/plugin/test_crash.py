"""A crash, a hang and a wrong result in one file are three failures with their cases; the rest of the file goes on."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import Project

# torch and Triton are imported inside the run, so these run in processes of their own. The interpreter stops a kernel
# that stores far outside or never ends by itself, so what dies and hangs is the launcher.
KERNELS = """
import ctypes
import sys
import triton
import triton.language as tl

@triton.jit
def add_kernel(x, y, out, n, BUG: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    total = tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask)
    if BUG == "wrong":
        total = total * 1.01
    tl.store(out + i, total, mask=mask)

def launch(bug):
    if bug == "store":
        ctypes.memset(8, 0, 1)
    while bug == "loop":
        pass

def add(x, y, bug=""):
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        launch(bug)
        add_kernel[(triton.cdiv(x.numel(), 64),)](x, y, out, x.numel(), BUG=bug, BLOCK=64)
    return out

spec = {"inputs": {"x": tensor("rows cols"), "y": tensor("rows cols")}}

@few
@fused_equivalent(torch.add, inputs={"input": tensor("rows cols"), "other": tensor("rows cols")})
def test_first_healthy(input, other):
    return add(input, other)

def reference(x, y):
    return x + y

@fused_equivalent(reference, **spec)
def test_dies(x, y):
    print("said before", file=sys.stderr)
    return add(x, y, "store")

@fused_equivalent(reference, **spec)
def test_hangs(x, y):
    return add(x, y, "loop")

@fused_equivalent(reference, **spec)
def test_wrong(x, y):
    return add(x, y, "wrong")

@few
@fused_equivalent(reference, **spec)
def test_last_healthy(x, y):
    return add(x, y)
"""
# The default limit of 20 s a case is for machines under load; what is shown here does not depend on it.
IMPATIENT = """
from dataclasses import replace
from pytest_fusion.engine import profiles

profiles.PROFILES["dev"] = replace(profiles.PROFILES["dev"], seconds=5.0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_every_test_gets_its_verdict(workers: tuple[str, ...], project: Project) -> None:
    """Three failures with their cases, two passes, exit status 1, with and without workers."""
    project.pytester.makeconftest(IMPATIENT)
    project.write(KERNELS)

    result = project.run(*workers, subprocess=True)

    result.assert_outcomes(passed=2, failed=3)
    assert result.ret == 1
    assert {name: (test["failed_check"], test["cause"]) for name, test in project.tests.items()} == {
        "test_first_healthy": (None, None),
        "test_dies": ("crash", "crash"),
        "test_hangs": ("crash", "hang"),
        "test_wrong": ("values", "unexplained"),
        "test_last_healthy": (None, None),
    }
    for name in ("test_dies", "test_hangs", "test_wrong"):
        case = project.tests[name]["case"]
        assert set(case["inputs"]) == {"x", "y"}
        assert case["dims"] == {"rows": 1, "cols": 1}
        assert (project.pytester.path / project.tests[name]["replay"]).is_file()


@pytest.mark.slow
def test_a_crash_prints_the_kernels_frames_once(project: Project) -> None:
    """The message has the user's own frames, innermost first, and none of this package's, Triton's or pytest's."""
    project.write(KERNELS)

    result = project.run("-k", "test_dies", subprocess=True)

    text = result.stdout.str().partition("= FAILURES =")[2]
    assert text.count("Segmentation fault") == 1
    assert "in launch\n" in text
    result.stdout.fnmatch_lines(
        [
            "  kernel traceback:",
            "*Segmentation fault (most recent call first)",
            '*File "*test_it.py", line * in launch',
            '*File "*test_it.py", line * in add',
            '*File "*test_it.py", line * in test_dies',
            "  replay: *",
        ]
    )
    assert "site-packages" not in text
    assert "said before" in text


def test_a_kernel_that_leaves(project: Project) -> None:
    """`os._exit` in a kernel is a crash of that test, told by its exit code."""
    project.write("""
import os

@fused_equivalent(relu_reference, inputs=X)
def test_leaves(x):
    os._exit(3)

def test_next():
    pass
""")

    result = project.run()

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*ended before the call returned (exit code 3)"])


def test_a_skip_inside_is_a_skip(project: Project) -> None:
    """`pytest.skip` in the test's body, which runs in another process, skips the test."""
    project.write("""
@fused_equivalent(relu_reference, inputs=X)
def test_skips(x):
    pytest.skip("not today")
""")

    result = project.run("-rs")

    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED *: not today"])


def test_the_smallest_case_dies_in_its_own_call(project: Project) -> None:
    """Check `repeat` calls with other sizes too: that 5 rows die makes no crash of the case with 2."""
    project.write(
        """
import os, signal

@fused_equivalent(relu_reference, **{"inputs": X})
def test_five_rows(x):
    if len(x) >= 5:
        os.kill(os.getpid(), signal.SIGSEGV)
    return relu(x)
"""
    )
    project.run(fork=True).assert_outcomes(failed=1)

    assert project.tests["test_five_rows"]["case"]["dims"]["rows"] == 5


def test_a_crash_in_further_calls_is_told(project: Project) -> None:
    """Where only a call of another size dies, the check that made it is named."""
    project.write(
        """
import os, signal

@fused_equivalent(relu_reference, inputs=X, dims={"rows": 3})
def test_dies(x):
    if torch.is_grad_enabled() and x.requires_grad:
        os.kill(os.getpid(), signal.SIGSEGV)
    return relu(x)
""".replace("inputs=X,", "inputs=X, grad=True,")
    )
    project.run(fork=True).assert_outcomes(failed=1)

    assert "in the further calls of check `gradients`" in project.tests["test_dies"]["message"]
