"""`check_equivalent` and the fixture `fusion`: one concrete call on the caller's own tensors."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from pytest_fusion import FusionError, FusionFailure, check_equivalent, interpreter
from pytest_fusion.engine.modes import Concrete
from pytest_fusion.errors import UnsupportedTritonError
from tests.plugin.conftest import Project


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """As in a script: no test is running."""
    monkeypatch.setattr("pytest_fusion.plugin.active.stack", [])
    monkeypatch.chdir(tmp_path)


def add(x: torch.Tensor, y: torch.Tensor, *, alpha: float = 1.0) -> torch.Tensor:
    return x + alpha * y


def strided() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 10)[1:, ::2], torch.randn(5, 5).t()


def test_a_script_that_imports_its_kernels_first_reads_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to put above the import, and no traceback of the child."""

    def too_early(*_: Any) -> NoReturn:
        raise UnsupportedTritonError(interpreter.TOO_EARLY) from RuntimeError("the child's traceback")

    monkeypatch.setattr("pytest_fusion.plugin.active.current", lambda: None)
    monkeypatch.setattr(Concrete, "run", too_early)
    with pytest.raises(UnsupportedTritonError) as caught:
        check_equivalent(torch.relu, lambda x: x.clamp_min(0), torch.ones(3))
    assert str(caught.value).endswith("\n    from pytest_fusion import interpreter\n    interpreter.enable()")
    assert (caught.value.__suppress_context__, caught.value.__cause__) == (True, None)


@pytest.mark.usefixtures("outside")
def test_the_record_of_a_right_call() -> None:
    """Outside pytest a right call gives a record of one case, with positional and keyword arguments in any mixture."""
    x, y = strided()

    for record in (
        check_equivalent(lambda a, b: b + a, add, x, y),
        check_equivalent(lambda x, y: y + x, add, x, y=y),
        check_equivalent(lambda a, b, *, alpha: a + b * alpha, add, x, y, alpha=2.0),
        check_equivalent(torch.relu, lambda x: x.clamp_min(0), x),
    ):
        assert (record.verdict, record.cases, record.replay) == ("pass", 1, None)
        assert record.checks["values"]["verdict"] == "pass"
        assert record.checks["vacuity"]["verdict"] == "unknown"


@pytest.mark.usefixtures("outside")
def test_a_wrong_call_tells_what_it_was_called_with(tmp_path: Any) -> None:
    """The failure names the caller's shapes, strides and numbers, and writes no replay file, which nobody could use."""
    x, y = strided()

    with pytest.raises(FusionFailure) as caught:
        check_equivalent(lambda x, y, alpha: x + y, add, x, y, alpha=3.0)

    failure = caught.value
    assert (failure.check, failure.replay) == ("values", None)
    assert failure.case is not None
    assert failure.case["inputs"]["x"]["strides"] == [10, 2]
    assert failure.case["drawn"] == {"alpha": 3.0}
    assert "called with:" in str(failure)
    assert "x: float32 [5, 5], strided, strides [10, 2], storage offset 10" in str(failure)
    assert "smallest case" not in str(failure)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("outside")
def test_layouts_are_kept() -> None:
    """The kernel gets tensors with the caller's strides, offset and alignment, in nested arguments too."""
    wanted = [
        torch.randn(6, 10)[1:, ::2],
        torch.randn(4, 3).t(),
        torch.randn(1, 4).expand(3, 4),
        torch.randn(400)[301:305],
        torch.randn(0, 3),
        torch.tensor(2.0),
    ]

    def fused(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        for mine, theirs in zip(tensors, wanted, strict=True):
            assert mine.stride() == theirs.stride()
            assert mine.data_ptr() != theirs.data_ptr() or not mine.numel()
            assert mine.data_ptr() % 64 == (mine.storage_offset() * 4) % 64
            assert mine.storage_offset() % 128 == theirs.storage_offset() % 128
        return [t * 2 for t in tensors]

    assert check_equivalent(fused, lambda tensors: [t + t for t in tensors], wanted).verdict == "pass"


@pytest.mark.usefixtures("outside")
def test_a_stride_ignored_is_found() -> None:
    """A kernel that takes memory for the tensor is right on a contiguous tensor and wrong on a transposed one."""

    def flat(x: torch.Tensor) -> torch.Tensor:
        return (torch.as_strided(x, (x.numel(),), (1,), x.storage_offset()) * 2).view(x.shape)

    x = torch.randn(4, 3)

    assert check_equivalent(flat, lambda x: x + x, x).verdict == "pass"
    with pytest.raises(FusionFailure):
        check_equivalent(flat, lambda x: x + x, x.t().contiguous().t())


@pytest.mark.usefixtures("outside")
def test_the_callers_tensors_are_not_written() -> None:
    """Neither an in-place kernel nor an in-place reference reaches the caller's memory; the first is a failure."""
    x = torch.randn(3, 4)
    before = x.clone()

    with pytest.raises(FusionFailure) as caught:
        check_equivalent(lambda x: x.mul_(2), lambda x: x * 2, x)
    with pytest.raises(FusionError, match="the reference writes into its input 'x'"):
        check_equivalent(lambda x: x * 2, lambda x: x.mul_(2), x)

    # What is returned is the input itself, which is seen first.
    assert caught.value.check in ("structure", "inputs")
    assert torch.equal(x, before)


@pytest.mark.usefixtures("outside")
def test_parameters_and_no_arguments_at_all() -> None:
    """A tensor that requires grad is taken by its values, and a call without arguments is a call."""
    weight = torch.nn.Parameter(torch.ones(3))

    assert check_equivalent(lambda w: w * 2, lambda w: w + w, weight).verdict == "pass"
    assert check_equivalent(lambda: torch.arange(4), lambda: torch.arange(4)).verdict == "pass"


@pytest.mark.usefixtures("outside")
def test_what_the_reference_raises_is_raised() -> None:
    """A reference that does not take the call is not the kernel's fault: its own exception is seen."""
    with pytest.raises(AttributeError, match="has no attribute 'no_such'"):
        check_equivalent(lambda x: x, lambda x: x.no_such, torch.ones(2))


@pytest.mark.usefixtures("outside")
def test_what_the_kernel_raises_is_a_failure() -> None:
    """A kernel that raises fails the check `error`, with its own traceback in the message."""

    def refuses(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("only 16 columns")

    with pytest.raises(FusionFailure, match="ValueError: only 16 columns") as caught:
        check_equivalent(refuses, lambda x: x, torch.ones(2))

    assert caught.value.check == "error"
    assert "in refuses" in str(caught.value)


def test_the_fixture_records_its_calls(project: Project) -> None:
    """`fusion` judges in a test, follows --fusion-isolate, and leaves one record for each call."""
    project.write("""
def test_two(fusion):
    fusion(relu, relu_reference, torch.randn(3, 4))
    fusion(relu, relu_reference, x=torch.randn(3, 4).t())

def test_wrong(fusion, fusion_device):
    assert fusion_device == "cpu"
    fusion(wrong, relu_reference, torch.randn(3, 4))

def test_not_a_failure():
    check_equivalent(relu, relu_reference, torch.randn(3, 4))
""")

    result = project.run("--fusion-isolate", "off")

    result.assert_outcomes(passed=2, failed=1)
    assert [(test["nodeid"].partition("::")[2], test["verdict"]) for test in project.report["tests"]] == [
        ("test_two", "pass"),
        ("test_two", "pass"),
        ("test_wrong", "fail"),
        ("test_not_a_failure", "pass"),
    ]
    assert {test["checks"]["crash"]["verdict"] for test in project.report["tests"]} == {"unknown"}
    result.stdout.fnmatch_lines(["wrong: structure failed"])


@pytest.mark.parametrize(
    ("fused", "calls"),
    [("lambda x: torch.relu(x)", False), ("lambda x: clamped(x)", True), ("calling(torch.relu)", False)],
)
def test_only_a_kernel_that_calls_the_reference_is_said_to(project: Project, fused: str, calls: bool) -> None:
    """Both functions are wrapped alike, or are closures of one code, and are told apart by what they wrap."""
    project.write(f"""
def calling(function):
    return lambda x: function(x)

clamped = calling(lambda x: x.clamp_min(0))

def test_it():
    record = check_equivalent({fused}, clamped, torch.randn(4, 33))
    assert ("the reference function itself" in record.checks["honesty"]["reason"]) is {calls}
""")

    project.run().assert_outcomes(passed=1)
