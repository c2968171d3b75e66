"""One call of the kernel, reported as facts."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.checks.context import error_verdict
from pytest_fusion.run.fused import run_fused
from pytest_fusion.run.placing import place

CPU = torch.device("cpu")


def call(fused: Any, extra: Any = None, fill: str | None = None, layout: Layout = Layout()) -> Any:  # noqa: B008
    case = Case({}, "float32", {"x": TensorCase("float32", layout)})
    placed = place({"x": torch.ones(2, 3)}, case, CPU, "nan")
    return run_fused(fused, placed, extra or {}, programs=10, fill=fill)


def test_a_result_comes_back_with_the_fixtures_passed_on() -> None:
    """Inputs and extra arguments are given by name."""
    outcome = call(lambda x, scale: x * scale, {"scale": 3})
    assert outcome.error is None
    assert outcome.result.tolist() == [[3.0] * 3] * 2
    assert outcome.damage == []


def deep(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(4, 4)


def test_an_exception_is_a_fact_with_its_origin() -> None:
    """The origin is the innermost frame outside of torch and of this package, without its line."""
    outcome = call(deep)
    assert type(outcome.error) is RuntimeError
    assert outcome.origin == "test_fused.py:deep"
    assert "reshape" in outcome.trace


def test_an_exception_does_not_hide_what_was_written_before_it() -> None:
    """A kernel that writes past its input and then raises leaves damage in the report."""

    def fused(x: torch.Tensor) -> torch.Tensor:
        ctypes.memset(x.data_ptr() + 4 * x.numel(), 1, 4)
        raise ValueError

    assert [damage.zone for damage in call(fused).damage] == ["after"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, pytest.skip.Exception, pytest.xfail.Exception])
def test_what_is_meant_for_others_passes_through(kind: type[BaseException]) -> None:
    """Ctrl-C and what says that a test is skipped or expected to fail are no findings about the kernel."""

    def fused(x: torch.Tensor) -> torch.Tensor:
        raise kind

    with pytest.raises(kind):
        call(fused)


def test_fresh_memory_holds_the_fill_of_the_call() -> None:
    """``torch.empty`` inside the kernel is NaN under one fill and finite under the other."""
    assert bool(call(lambda x: torch.empty(4)).result.isnan().all())
    assert bool(call(lambda x: torch.empty(4), fill="huge").result.isfinite().all())


def test_memory_of_the_caller_is_not_watched_after_the_call() -> None:
    """Once the call is over, allocations are ordinary again."""
    outcome = call(lambda x: x + 1)
    made = torch.empty(3)
    assert outcome.watch.unwritten(made) is None


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit"),
        (pytest.fail.Exception("own"), "Failed: own"),
        (Wordless(), "Wordless: <"),
        (ValueError("half a pair: \ud800"), "half a pair: \\ud800"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_else_a_kernel_raises_is_a_fact_that_can_be_told(error: BaseException, said: str) -> None:
    """Exits, a test's own ``fail``, an exception that cannot be printed, and text that UTF-8 cannot hold."""

    def fused(x: torch.Tensor) -> torch.Tensor:
        raise error

    outcome = call(fused)
    assert outcome.error is error
    assert said in outcome.trace
    outcome.trace.encode()
    error_verdict(outcome).reason.encode()


def test_an_exception_that_is_kept_is_told_with_the_frames_of_one_call() -> None:
    """Each ``raise`` of one object adds its frames to those before; none of them are this package's."""
    kept = ValueError("kept")

    def fused(x: torch.Tensor) -> torch.Tensor:
        raise kept

    for _ in range(3):
        outcome = call(fused)
    assert outcome.trace.count("in fused\n") == 1
    assert "in _called" not in outcome.trace


def test_of_an_endless_message_the_ends_are_told() -> None:
    """A tensor that was printed into the message leaves room for the rest of the report."""

    def fused(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("x" * 100_000 + "\n" + "row\n" * 5000 + "the end")

    outcome = call(fused)
    assert len(outcome.trace) < 10_000
    assert "lines ..." in outcome.trace
    assert outcome.trace.endswith("the end\n")
    assert len(error_verdict(outcome).reason) < 1000
