"""What the plugin costs those who do not use it, and what it needs of others."""

from __future__ import annotations

import sys

import pytest

from tests.plugin.conftest import Project

PROBE = """
import sys

def pytest_unconfigure(config):
    print("heavy", sorted({"torch", "triton", "hypothesis", "numpy"} & set(sys.modules)))
"""
WITHOUT = ("-p", "no:jaxtyping", "-p", "no:hypothesispytest")
FUSED = """
@settings(max_examples=3)
@fused_equivalent(relu_reference, inputs=X)
def test_it(x):
    return relu(x)
"""


@pytest.mark.parametrize("options", [(), ("--collect-only",), ("--version",)])
def test_a_run_without_fused_tests_imports_nothing_heavy(options: tuple[str, ...], pytester: pytest.Pytester) -> None:
    """Neither torch, Triton, Hypothesis nor numpy; the plugins of Hypothesis and jaxtyping, which may, are left out."""
    pytester.makeconftest(PROBE)
    pytester.makepyfile("def test_it(): pass")

    result = pytester.runpytest_subprocess("--fusion-device", "cpu", *WITHOUT, *options)

    assert result.ret == 0
    if "--version" not in options:
        result.stdout.fnmatch_lines(["heavy []"])


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_looked_for_while_tests_are_collected(enabled: bool, pytester: pytest.Pytester) -> None:
    """Nor among what was collected, at the end; afterwards it is as it was before."""
    pytester.makeconftest(f"import gc\ngc.enable() if {enabled} else gc.disable()")
    pytester.makepyfile(f"""
import gc
assert not gc.isenabled()
def test_it():
    assert gc.isenabled() == {enabled}
    assert gc.get_freeze_count() > 10_000
""")

    pytester.runpytest_subprocess("--fusion-device", "cpu").assert_outcomes(passed=1)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["xdist", "hypothesispytest", "terminal", "junitxml", "randomly", "cacheprovider"])
def test_other_plugins_may_be_absent(missing: str, project: Project) -> None:
    """Fused tests run and report without any one of the plugins that stand beside this one."""
    project.write(FUSED)

    result = project.run("-p", f"no:{missing}", subprocess=True)

    assert result.ret == 0
    assert project.verdicts == {"test_it": "pass"}


@pytest.mark.slow
def test_the_debugger_sees_the_kernel(project: Project) -> None:
    """With --pdb a failure stops in this process, where the user can look."""
    project.write("""
@fused_equivalent(relu_reference, inputs=X)
def test_it(x):
    return wrong(x)
""")
    child = project.pytester.spawn_pytest("--pdb --fusion-device cpu -p no:cacheprovider") if _has_pexpect() else None
    if child is None:
        result = project.pytester.run("sh", "-c", f"echo q | {sys.executable} -m pytest --pdb --fusion-device cpu")
        assert "test_it: structure failed" in result.stdout.str()
        return
    child.expect("structure failed")
    child.expect("Pdb")
    child.sendline("q")
    child.read()


def _has_pexpect() -> bool:
    try:
        import pexpect  # noqa: F401
    except ImportError:
        return False
    return True


TRITON = """
import triton
import triton.language as tl

@triton.jit
def copy_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)

@settings(max_examples=3, database=None)
@fused_equivalent(lambda x: x * 1, inputs=X)
def test_it(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    copy_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out
"""


@pytest.mark.slow
def test_a_triton_that_nobody_knows_says_so(project: Project) -> None:
    """An interpreter with other insides is refused in words, not computed with, and not held against the kernel."""
    project.pytester.makeconftest("""
from pytest_fusion.interpreter.bridge import contract
contract._INTERPRETER["InterpreterBuilder.create_of_a_later_release"] = None
""")
    project.write(TRITON)

    result = project.run(subprocess=True)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["Triton *: the CPU lane knows the interpreter of *create_of_a_later_release is missing*"]
    )
    assert project.verdicts == {"test_it": "unknown"}


@pytest.mark.slow
def test_a_triton_that_is_new_says_so(project: Project) -> None:
    """A release that was not tested but looks the same is used, with a note."""
    project.pytester.makeconftest(
        "from pytest_fusion.interpreter.bridge import contract\ncontract.TESTED = ('0.0.0',)\n"
    )
    project.write(TRITON)

    project.run(subprocess=True).assert_outcomes(passed=1)

    assert any("Triton" in note for note in project.tests["test_it"]["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "import triton.runtime.interpreter"], ids=["unmended", "mended"])
def test_a_kernel_made_too_early_says_so(more: str, project: Project) -> None:
    """A kernel made before the interpreter was on cannot be launched: that is said, and not held against it."""
    head, _, test = TRITON.partition("@settings")
    # A plugin of the command line is loaded before any entry point.
    project.pytester.makepyfile(early=f"{more}\n{head}")
    project.write(f"from early import copy_kernel, triton\n@settings{test}")
    environment = f"env -u TRITON_INTERPRET PYTHONPATH=. {sys.executable} -m pytest -p early -p no:cacheprovider"

    result = project.pytester.run("sh", "-c", f"{environment} --fusion-device cpu --fusion-json fusion.json")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["Triton was imported, and this kernel made, before*set TRITON_INTERPRET=1*"])
    result.stdout.no_fnmatch_line("*in the isolated process*")
    assert project.verdicts == {"test_it": "unknown"}
