"""A call that shows no test."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pytest

from pytest_fusion.run.stress import unmarked


def nothing() -> None: ...


def look() -> dict[str, Any]:
    """What a kernel can see of its caller."""
    frame: Any = sys._getframe()
    seen: list[tuple[str, str, str]] = []
    while frame is not None:
        seen.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_globals["__name__"]))
        frame = frame.f_back
    return {
        "stack": seen,
        "imported": "pytest" in sys.modules or "_pytest" in sys.modules,
        "variables": [name for name in os.environ if name.startswith("PYTEST")],
        "command": list(sys.argv),
        "thread": threading.current_thread(),
    }


def test_nothing_shows_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stack of such a call, its environment, imports and command line do not know of pytest; then all is back."""
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "here")
    command = list(sys.argv)
    seen = unmarked.called(look, nothing)
    own = __file__
    others = [entry for entry in seen["stack"] if entry[0] != own]
    assert others
    assert not any("pytest" in part for entry in others for part in entry)
    assert not seen["imported"]
    assert seen["variables"] == []
    assert seen["command"] == ["python"]
    assert "pytest" in sys.modules
    assert os.environ["PYTEST_CURRENT_TEST"] == "here"
    assert sys.argv == command


def test_the_stack_can_be_shown() -> None:
    """With frames the same thread looks like the caller: files, functions and modules in their order."""
    frames = unmarked.stack()
    seen = unmarked.called(look, nothing, frames)
    shown = [unmarked.Frame(*entry) for entry in seen["stack"][::-1]]
    assert frames[-1].function == "test_the_stack_can_be_shown"
    assert any("".join(map(str, shown[i : i + len(frames)])) == "".join(map(str, frames)) for i in range(len(shown)))
    assert seen["imported"]
    assert seen["thread"] is not threading.current_thread()


def test_what_is_raised_comes_back() -> None:
    """Exceptions of the call, interrupts and skips too, are raised in the caller's thread."""
    for kind in (ValueError, KeyboardInterrupt, pytest.skip.Exception):

        def fail(kind: type[BaseException] = kind) -> None:
            raise kind("mine")

        with pytest.raises(kind):
            unmarked.called(fail, nothing)
    assert "pytest" in sys.modules


def test_preparation_runs_in_the_thread() -> None:
    """What is chosen by thread is chosen where the call runs."""
    mark = threading.local()
    assert unmarked.called(lambda: mark.value, lambda: setattr(mark, "value", 3)) == 3


def test_no_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waits for its caller is given up, with the environment restored."""
    monkeypatch.setattr(unmarked, "_PATIENCE_S", 0.01)
    gate = threading.Event()
    with pytest.raises(TimeoutError):
        unmarked.called(gate.wait, nothing)
    gate.set()
    assert "pytest" in sys.modules
