"""The forked child's side of `run_isolated`: its start, what it sends, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from pytest_fusion.run.process.frames import write_frame
from pytest_fusion.spec.wording import words

NOTE: Final = b"n"
RESULT: Final = b"r"
ERROR: Final = b"e"

_PR_SET_PDEATHSIG: Final = 1
# Of glibc's malloc.h, and the largest documented block for the second.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGEST_BLOCK = -1, -3, 1 << 25


class ChildTraceback(Exception):
    """The text of the child's traceback, as the cause of the exception raised here."""

    def __str__(self) -> str:
        return f"\n\nin the isolated process:\n{self.args[0]}"


@dataclass(frozen=True, slots=True)
class ChildError:
    """An exception that ``work`` raised: as text, and pickled if its type allows."""

    type_name: str
    message: str
    traceback: str
    pickled: bytes | None

    def reraise(self) -> NoReturn:
        """Raise the exception itself, or a ``RuntimeError`` that names it if it cannot be rebuilt."""
        error: BaseException | None = None
        if self.pickled is not None:
            with contextlib.suppress(Exception):
                error = _rebuilt(self.pickled)
        if error is None:
            error = RuntimeError(f"{self.type_name}: {self.message}")
        raise error from ChildTraceback(self.traceback)

    @classmethod
    def of(cls, error: BaseException) -> ChildError:
        text = "".join(traceback.format_exception(error))
        return cls(type(error).__qualname__, words(error), text, _pickled(error))


class Channel:
    """Sends notes from the child while it works."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def note(self, data: Any) -> None:
        """Send the next step, as JSON types, else ``TypeError``; the parent has it before this returns, and the time
        limit restarts."""
        write_frame(self._descriptor, NOTE, json.dumps(data).encode())


def live(work: Callable[[Channel], object], descriptor: int, out: int, err: int, parent: int) -> NoReturn:
    """Run ``work`` in the child and leave by ``os._exit``: exit handlers and pytest's clean-up are the parent's."""
    code = 1
    try:
        inherited = (sys.stdout, sys.stderr)
        _prepare_child(out, err, parent)
        try:
            kind, payload = RESULT, pickle.dumps(work(Channel(descriptor)), protocol=pickle.HIGHEST_PROTOCOL)
        except BaseException as error:  # noqa: BLE001 - the parent decides what SystemExit or a skip means
            kind, payload = ERROR, pickle.dumps(ChildError.of(error))
        for stream in (*inherited, sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        write_frame(descriptor, kind, payload)
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, this process must not return into pytest
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _prepare_child(out: int, err: int, parent: int) -> None:
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # a group of its own: killed as a whole, and Ctrl-C reaches only the parent
    _die_with(parent)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nowhere, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    os.close(nowhere)
    sys.stdout, sys.stderr = _text_stream(1), _text_stream(2)
    faulthandler.enable(file=2)
    _no_core_dump()
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)  # an event loop's pipe, shared with the parent
    # The child must not finalise the parent's garbage, which may own temporary folders and processes.
    gc.freeze()
    _keep_freed_memory()
    _one_thread()


def _keep_freed_memory() -> None:
    """Make malloc reuse freed memory: newly mapped memory is zeroed page by page at its first touch. Six rounding runs
    of 60,000 numbers took 7.7 ms with that and take 2.2 without."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, 16 * _LARGEST_BLOCK)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)


def _one_thread() -> None:
    """Restrict torch to one thread: the fork copies no other, and waiting for a missing one never ends."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(1)
    inductor = sys.modules.get("torch._inductor.config")
    if inductor is not None:
        inductor.compile_threads = 1  # type: ignore[attr-defined]


def _die_with(parent: int) -> None:
    """End this process with the parent, which a timeout plugin may end by ``os._exit``."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _no_core_dump() -> None:
    """Write no core: crashes are expected here, and a core of a process with torch takes seconds and gigabytes."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _text_stream(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def _pickled(error: BaseException) -> bytes | None:
    """``error`` in a form that can be loaded again, or ``None``. Exceptions with own arguments often fail at loading,
    which calls ``__init__`` with ``args``, and pytest's (``Skipped``) claim to be builtins: both are stored in
    parts."""
    kind = type(error)
    home = getattr(kind.__init__, "__module__", "")
    for form in (error, _Parts(home, kind.__qualname__, error.args, dict(vars(error)))):
        with contextlib.suppress(Exception):
            data = pickle.dumps(form)
            if type(_rebuilt(data)) is kind:
                return data
    return None


@dataclass(frozen=True, slots=True)
class _Parts:
    """An exception as its type's address, its ``args`` and its attributes."""

    module: str
    type_name: str
    args: tuple[Any, ...]
    attributes: dict[str, Any]


def _rebuilt(data: bytes) -> BaseException | None:
    value = pickle.loads(data)
    if isinstance(value, _Parts):
        parts, kind = value, getattr(sys.modules[value.module], value.type_name)
        value = kind.__new__(kind, *parts.args)
        vars(value).update(parts.attributes)
    return value if isinstance(value, BaseException) else None
