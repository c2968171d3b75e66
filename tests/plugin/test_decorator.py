"""`@fused_equivalent` wherever a test may stand, with whatever may stand beside it."""

from __future__ import annotations

from tests.plugin.conftest import Project


def test_functions_methods_and_parametrizations(project: Project) -> None:
    """A function, a method and each parameter of a parametrized test are judged on their own."""
    project.write("""
@few
@fused_equivalent(relu_reference, inputs=X)
def test_function(x):
    return relu(x)

class TestMethods:
    factor = 1

    @few
    @fused_equivalent(relu_reference, inputs=X)
    def test_method(self, x):
        return relu(x) * self.factor

    @pytest.mark.parametrize("function", [relu, wrong])
    @few
    @fused_equivalent(relu_reference, inputs=X)
    def test_each(self, x, function):
        return function(x)
""")

    project.run().assert_outcomes(passed=3, failed=1)

    assert project.verdicts == {
        "test_function": "pass",
        "TestMethods::test_method": "pass",
        "TestMethods::test_each[relu]": "pass",
        "TestMethods::test_each[wrong]": "fail",
    }


def test_the_reference_gets_parameters_that_it_takes(project: Project) -> None:
    """A parametrization that the reference names reaches it, one that it does not name reaches the test alone."""
    project.write("""
@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize("word", ["a"])
@few
@fused_equivalent(lambda x, scale: x * scale, inputs=X)
def test_scale(x, scale, word):
    assert word == "a"
    return x * scale
""")

    project.run().assert_outcomes(passed=2)


def test_function_scoped_fixtures(project: Project) -> None:
    """Fixtures of function scope are made once for all cases, without a complaint of Hypothesis."""
    project.write("""
@pytest.fixture
def count():
    return []

@pytest.mark.parametrize("p", [0])
@few
@fused_equivalent(relu_reference, inputs=X)
def test_fixtures(x, count, tmp_path, monkeypatch, p):
    count.append(p)
    assert tmp_path.is_dir()
    monkeypatch.setenv("FUSED", "1")
    return relu(x)

@settings(max_examples=8)
@fused_equivalent(relu_reference, inputs=X)
def test_alone(x, tmp_path):
    return relu(x)
""")

    project.run("-W", "error").assert_outcomes(passed=2)


def test_marks_above_and_below(project: Project) -> None:
    """`xfail`, `skip` and `skipif` mean the same above and below, and an expected failure says so in its record."""
    project.write("""
@pytest.mark.xfail(strict=True)
@few
@fused_equivalent(relu_reference, inputs=X)
def test_xfail_above(x):
    return wrong(x)

@few
@fused_equivalent(relu_reference, inputs=X)
@pytest.mark.xfail(raises=FusionFailure, strict=True)
def test_xfail_below(x):
    return wrong(x)

@pytest.mark.skip
@fused_equivalent(relu_reference, inputs=X)
def test_skip_above(x):
    raise AssertionError

@fused_equivalent(relu_reference, inputs=X)
@pytest.mark.skipif(True, reason="below")
def test_skip_below(x):
    raise AssertionError

@pytest.mark.xfail(strict=True)
@few
@fused_equivalent(relu_reference, inputs=X)
def test_right_after_all(x):
    return relu(x)
""")

    result = project.run()

    result.assert_outcomes(xfailed=2, skipped=2, failed=1)
    assert {name: (test["verdict"], test["expected"]) for name, test in project.tests.items()} == {
        "test_xfail_above": ("fail", True),
        "test_xfail_below": ("fail", True),
        "test_right_after_all": ("pass", False),
    }
    assert "FAIL test_it.py::test_xfail" not in result.stdout.str()


def test_annotations_mean_the_same_as_inputs(project: Project) -> None:
    """Inputs read from jaxtyping annotations give the same cases as inputs=, wrong kernel and right one alike."""
    project.write("""
from jaxtyping import Float
from torch import Tensor

def add(x, y):
    return x + y

@fused_equivalent(add)
def test_annotated(x: Float[Tensor, "rows hidden"], y: Float[Tensor, "hidden"] | None, scale=2.0):
    raise AssertionError

@fused_equivalent(add, inputs={"x": tensor("rows hidden"), "y": optional(tensor("hidden"))})
def test_given(x, y):
    raise AssertionError

def test_same():
    assert test_annotated.fusion_spec.inputs == test_given.fusion_spec.inputs

@few
@fused_equivalent(add)
def test_right(x: Float[Tensor, "rows hidden"], y: Float[Tensor, "rows hidden"]):
    return torch.add(x, y)

@few
@fused_equivalent(add)
def test_wrong(x: Float[Tensor, "rows hidden"], y: Float[Tensor, "rows hidden"]):
    return torch.add(x, y).double()
""")

    project.run("-k", "same or right or wrong").assert_outcomes(passed=2, failed=1)

    assert sorted(project.tests["test_wrong"]["case"]["dims"]) == ["hidden", "rows"]


def test_a_spec_makes_a_test(project: Project) -> None:
    """`FusionSpec.test()` is collected at module level and in a class, takes marks, and fails as any other test."""
    project.write("""
RIGHT = FusionSpec(fused=relu, reference=relu_reference, inputs=X)
WRONG = FusionSpec(fused=wrong, reference=relu_reference, inputs=X, name="wide")
test_right = few(RIGHT.test())
test_wrong = WRONG.test()
test_expected = pytest.mark.xfail(strict=True)(WRONG.test())

class TestInClass:
    test_right = few(RIGHT.test())
""")

    result = project.run("-v")

    result.assert_outcomes(passed=2, failed=1, xfailed=1)
    result.stdout.fnmatch_lines(["wide: structure failed", "*replay: pytest test_it.py::test_wrong --fusion-replay *"])
    result.stdout.no_fnmatch_line("*<- *")


def test_a_failure_carries_its_facts(project: Project) -> None:
    """A caught `FusionFailure` has check, case, cause and replay, and the test that caught it passes."""
    project.write("""
from pathlib import Path

def neighbour(x):
    return torch.as_strided(x, x.shape, torch.empty(x.shape).stride(), x.storage_offset()) * 2

SPEC = FusionSpec(fused=neighbour, reference=lambda x: x * 2, inputs=X)

def test_caught():
    with pytest.raises(FusionFailure) as caught:
        SPEC.test()()
    failure = caught.value
    assert isinstance(failure, AssertionError)
    assert failure.check in ("values", "bounds")
    assert failure.cause == "ignores-strides"
    assert sorted(failure.case["dims"]) == ["hidden", "rows"]
    assert failure.case["inputs"]["x"]["layout"] != "contiguous"
    assert Path(failure.replay).is_file()
""")

    result = project.run()

    result.assert_outcomes(passed=1)
    assert [(test["verdict"], test["expected"]) for test in project.report["tests"]] == [("fail", True)]
    result.stdout.no_fnmatch_line("FAIL *")


def test_a_failure_prints_its_message_alone(project: Project) -> None:
    """Neither frames of this package nor pytest's stand above the message, unless --full-trace asks for them."""
    project.write("""
@few
@fused_equivalent(relu_reference, inputs=X)
def test_wrong(x):
    return wrong(x)
""")

    short = project.run().stdout.str()
    full = project.run("--full-trace").stdout.str()

    assert "test_wrong: structure failed" in short
    assert "decorator.py" not in short
    assert "decorator.py" in full


def test_a_class_of_unittest(project: Project) -> None:
    """A method of a `unittest.TestCase` is judged too."""
    project.write("""
import unittest

class TestOld(unittest.TestCase):
    @few
    @fused_equivalent(relu_reference, inputs=X)
    def test_right(self, x):
        return relu(x)

    @few
    @fused_equivalent(relu_reference, inputs=X)
    def test_wrong(self, x):
        return wrong(x)
""")

    project.run().assert_outcomes(passed=1, failed=1)

    assert project.verdicts == {"TestOld::test_right": "pass", "TestOld::test_wrong": "fail"}


def test_what_cannot_run_here_is_unknown(project: Project) -> None:
    """A spec that requires what is not here is skipped as unknown, at its own line, and the run is green."""
    project.write("""
@fused_equivalent(relu_reference, inputs=X, requires="cuda")
def test_cuda(x):
    raise AssertionError

@fused_equivalent(relu_reference, inputs=X, requires=(9, 0))
def test_hopper(x):
    raise AssertionError

@fused_equivalent(relu_reference, inputs=X, requires=["torch", "cdua"])
def test_package(x):
    raise AssertionError
""")

    result = project.run("-rs")

    result.assert_outcomes(skipped=3)
    assert result.ret == 0
    assert set(project.verdicts.values()) == {"unknown"}
    result.stdout.fnmatch_lines(
        [
            "UNKNOWN test_it.py::test_cuda: it requires a CUDA device",
            "UNKNOWN test_it.py::test_hopper: it requires compute capability 9.0, and this lane is the CPU's",
            "UNKNOWN test_it.py::test_package: it requires the package 'cdua', which is not installed; did you mean*",
            "SKIPPED * test_it.py:*: unknown: it requires a CUDA device",
        ]
    )


def test_a_check_that_no_case_is_asked_for_says_so_in_a_test_that_passes(project: Project) -> None:
    """``grad=True`` of whole numbers that a function made is unknown, and no failure ended the run."""
    project.write("""
from pytest_fusion import derived

@few
@fused_equivalent(lambda x, i: torch.relu(x) + i, inputs={
    "x": tensor("n", dtype=torch.int64), "i": derived(lambda x: x + 1)}, grad=True)
def test_it(x, i):
    return relu(x) + i
""")

    project.run().assert_outcomes(passed=1)

    gradients = project.report["tests"][0]["checks"]["gradients"]
    assert (gradients["verdict"], gradients["reason"]) == ("unknown", "no case met the conditions of this check")


def test_a_lambda_is_called_as_its_test(project: Project) -> None:
    """Two of them in one file failed under the same name, which is none."""
    project.write("test_doubled = fused_equivalent(relu_reference, inputs=X)(lambda x: wrong(x))\n")

    project.run().stdout.fnmatch_lines(["test_doubled: structure failed"])
