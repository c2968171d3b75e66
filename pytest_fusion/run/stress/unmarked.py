"""A call without visible signs of a test: in a plain thread, without pytest in the environment or imports.

It hides the caller's frames (``sys._getframe``), ``PYTEST_CURRENT_TEST``, ``"pytest" in sys.modules`` and ``sys.argv``.
Other signs stay visible: this package's imports, poison in gaps and fresh memory, many small odd shapes.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

# Longer than any case of a profile other than nightly may take.
_PATIENCE_S = 60.0
_HIDDEN_MODULES = ("pytest", "_pytest")
_HIDDEN_VARIABLES = "PYTEST"


@dataclass(frozen=True, slots=True)
class Frame:
    """The attributes of a frame that a kernel could inspect."""

    filename: str
    function: str
    module: str


def stack() -> list[Frame]:
    """The caller's stack, outermost frame first."""
    frames = [
        Frame(frame.f_code.co_filename, frame.f_code.co_name, str(frame.f_globals.get("__name__")))
        for frame, _ in traceback.walk_stack(sys._getframe(1))
    ]
    return frames[::-1]


def called(call: Callable[[], Any], prepare: Callable[[], Any], frames: Sequence[Frame] = ()) -> Any:
    """The result of ``call`` in its own thread, below stand-ins for ``frames``; raises what it raises. Without
    ``frames`` pytest is hidden. ``prepare`` runs first in the thread (devices are chosen by thread). Raises
    ``TimeoutError`` if the call does not end."""
    for frame in reversed(frames):
        # A function that calls its argument and has this frame's attributes.
        call = partial(_disguised(_call, frame), call)
    box: dict[str, Any] = {}
    # No file name: a frame of this file would reveal the test.
    worker = _disguised(_work, Frame("<thread>", "work", "__main__"))
    thread = threading.Thread(target=worker, args=(prepare, call, box), daemon=True)
    with contextlib.nullcontext() if frames else _hidden():
        thread.start()
        thread.join(_PATIENCE_S)
    if thread.is_alive():
        raise TimeoutError(f"no end after {_PATIENCE_S:g} s in another thread")
    if "error" in box:
        raise box["error"]
    return box["result"]


def _disguised(function: Callable[..., Any], frame: Frame) -> Callable[..., Any]:
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_filename=frame.filename, co_name=frame.function, co_qualname=frame.function)
    return FunctionType(code, {"__name__": frame.module, "__builtins__": builtins})


def _call(inner: Callable[[], Any]) -> Any:
    return inner()


def _work(prepare: Callable[[], Any], call: Callable[[], Any], box: dict[str, Any]) -> None:
    try:
        prepare()
        box["result"] = call()
    except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
        box["error"] = error


@contextmanager
def _hidden() -> Iterator[None]:
    """Hide pytest in imports, environment and command line; submodules stay, so that none loads twice."""
    modules = {name: sys.modules.pop(name) for name in _HIDDEN_MODULES if name in sys.modules}
    names = [name for name in os.environ if name.startswith(_HIDDEN_VARIABLES)]
    variables = {name: os.environ.pop(name) for name in names}
    arguments, sys.argv = sys.argv, ["python"]
    try:
        yield
    finally:
        sys.argv = arguments
        os.environ.update(variables)
        sys.modules.update(modules)
