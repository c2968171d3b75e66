"""What judging stands on: what a call leaves replaced is named and put back."""

from __future__ import annotations

import builtins
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion.checks import values_check as values
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.verdict import Verdict, passed
from pytest_fusion.run import pristine


@pytest.fixture(autouse=True)
def _nothing_found_before() -> None:
    pristine.take()


def _code_of_ours() -> None:
    values.as_verdict.__code__ = (lambda verdicts: None).__code__


REPLACEMENTS: dict[str, Callable[[], Any]] = {
    "torch.equal": lambda: setattr(torch, "equal", print),
    "torch.Tensor.eq": lambda: setattr(torch.Tensor, "eq", print),
    "torch.cuda.synchronize": lambda: setattr(torch.cuda, "synchronize", print),
    "time.perf_counter": lambda: setattr(time, "perf_counter", print),
    "math.isclose": lambda: setattr(math, "isclose", print),
    "builtins.all": lambda: setattr(builtins, "all", print),
    "pytest_fusion.checks.repeat.repeat.differing": lambda: setattr(repeat, "differing", print),
    "pytest_fusion.checks.verdict.Verdict.failed": lambda: setattr(Verdict, "failed", property(lambda v: False)),
    "pytest_fusion.checks.values_check.as_verdict": _code_of_ours,
}


@pytest.mark.parametrize("name", list(REPLACEMENTS))
def test_what_is_replaced_is_named_and_put_back(name: str) -> None:
    """Functions of torch, of the standard library and of this package, methods and code objects are all seen."""
    before = (torch.equal, torch.cuda.synchronize, time.perf_counter, math.isclose, builtins.all, repeat.differing)
    code = values.as_verdict.__code__
    with pristine.watched():
        REPLACEMENTS[name]()
    assert pristine.found()
    assert pristine.take() == [name]
    assert not pristine.found()
    after = (torch.equal, torch.cuda.synchronize, time.perf_counter, math.isclose, builtins.all, repeat.differing)
    assert after == before
    assert values.as_verdict.__code__ is code
    assert "eq" not in vars(torch.Tensor)
    assert not passed("values").failed
    assert Verdict("values", "fail").failed


def test_an_exception_does_not_leave_it_replaced() -> None:
    """A body that raises is looked at too, and its exception passes."""
    before = torch.equal

    def body() -> None:
        with pristine.watched():
            torch.equal = print  # type: ignore[assignment]
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        body()
    assert torch.equal is before
    assert pristine.take() == ["torch.equal"]


def test_who_claims_to_be_equal_is_seen() -> None:
    """Functions are told apart by identity: one that says it equals the old one is another one."""

    class Impostor:
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    with pristine.watched():
        repeat.differing = Impostor()  # type: ignore[assignment]
    assert pristine.take() == ["pytest_fusion.checks.repeat.repeat.differing"]


def test_what_stood_before_or_is_new_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch from before the body stays, and names that nothing had before are nobody's business."""
    monkeypatch.setattr(torch, "allclose", print)
    with pristine.watched():
        torch.Tensor.a_name_that_is_new = 1  # type: ignore[attr-defined]
    del torch.Tensor.a_name_that_is_new  # type: ignore[attr-defined]
    assert pristine.take() == []
    assert torch.allclose is print  # type: ignore[comparison-overlap]


def test_a_setting_that_could_not_be_read_at_first_is_watched_later() -> None:
    """The current stream of a process whose first case is made before CUDA runs in it."""
    streams: list[str | None] = [None]
    watch = pristine._Watch()
    watch._slots = [pristine._setting("the stream", lambda: streams[0], lambda value: streams.__setitem__(0, value))]
    streams[0] = "home"
    watch.renew()
    streams[0] = "side"
    assert watch.undo() == ["the stream"]
    assert streams == ["home"]


def test_the_first_compilation_of_a_process_is_no_finding() -> None:
    """torch.compile, custom operators and a backward replace nothing of what is watched."""
    with pristine.watched():
        doubled = torch.compile(lambda t: t * 2, backend="eager")
        doubled(torch.ones(3, requires_grad=True)).sum().backward()
    assert pristine.take() == []


def test_a_stranger_in_our_modules_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function from elsewhere in one of the judge's modules is told at any time."""
    assert pristine.foreign() == []
    monkeypatch.setattr(repeat, "differing", lambda a, b: None)
    assert pristine.foreign() == ["pytest_fusion.checks.repeat.repeat.differing"]
