"""Calls and the streams of a GPU: behind a slow producer, with delayed work, beside another current device, waiting."""

from __future__ import annotations

import contextlib
import linecache
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch

from pytest_fusion.case.containers import map_tensors, tensors_of
from pytest_fusion.interpreter.launch import Launch
from pytest_fusion.interpreter.scoped import holding
from pytest_fusion.run import pristine
from pytest_fusion.run.compiled import observe_compiled

# 2^26 cycles are some 35 ms at the 1.9 GHz of an H100: a launch from Python takes well below one.
CYCLES = 1 << 26
# About 10 ms at 2 GHz: far longer than the copy of a result on the caller's stream takes to launch.
_DELAY_CYCLES = 20_000_000
_SYNCHRONISING = "called a synchronizing CUDA operation"
_FOREIGN = frozenset({"torch", "triton", "pytest_fusion", "warnings"})


@dataclass(slots=True)
class Behind:
    """A call behind a slow producer. ``late``: the default stream finished later work before the producer."""

    result: Any
    arguments: dict[str, Any]
    late: bool


def behind_producer(
    call: Callable[..., Any],
    arguments: Mapping[str, Any],
    produce: Callable[[], None],
    *,
    wait: bool = False,
    cycles: int = CYCLES,
) -> Behind:
    """The result of a call on a new stream, after ``produce`` (writes the arguments) behind ``cycles`` of waiting. A
    consumer on the same stream copies results and arguments at once. ``wait`` finishes the producer before the call, so
    a wrong result has other reasons. Raises what the call raises."""
    device = tensors_of(arguments)[0].device
    # The host's clock does not show whether the producer still runs, on a shared GPU (the wait goes on while others
    # have it) or on streams that share a hardware queue: a copy on the default stream shows it.
    ended, seen = torch.zeros(2, dtype=torch.int32, device=device).unbind()
    stream, default = torch.cuda.Stream(device), torch.cuda.default_stream(device)  # type: ignore[no-untyped-call]
    pristine.synchronize(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        produce()
        ended.fill_(1)
        if wait:
            stream.synchronize()
        result = call(**arguments)
        with torch.cuda.stream(default):
            seen.copy_(ended)
        # The arguments of kernels that write in place are results too.
        copies = map_tensors((result, dict(arguments)), lambda t: t.clone())
    pristine.synchronize(device)
    return Behind(copies[0], copies[1], late=int(seen) == 0)


def settle(device: torch.device) -> None:
    pristine.synchronize(device)


def current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device)


def other_device(device: torch.device) -> torch.device | None:
    """A CUDA device that is not ``device``; ``None`` with one GPU."""
    count = torch.cuda.device_count()
    return torch.device("cuda", ((device.index or 0) + 1) % count) if count > 1 else None


@contextlib.contextmanager
def delayed(device: torch.device) -> Iterator[None]:
    """Begin each other stream of ``device`` that the body uses with a pause; does nothing without CUDA. It sees streams
    selected by ``torch.cuda.set_stream`` (``with torch.cuda.stream``) or a Triton launch, not in C++."""
    if device.type != "cuda":
        yield
        return
    home, met = torch.cuda.current_stream(device), set[int]()
    upstream = torch.cuda.set_stream

    def delay(_: Launch | None = None) -> None:
        stream = torch.cuda.current_stream(device)
        if stream == home or stream.cuda_stream in met or torch.cuda.is_current_stream_capturing():
            return
        met.add(stream.cuda_stream)
        torch.cuda._sleep(_DELAY_CYCLES)  # type: ignore[no-untyped-call]

    def set_stream(stream: Any) -> None:
        upstream(stream)
        delay()

    with holding(torch.cuda, set_stream=set_stream), observe_compiled(delay):
        yield


@dataclass(frozen=True, slots=True)
class Wait:
    """A line that waits for the device, and its function, which begins at line ``begins``."""

    file: str
    line: int
    function: str
    begins: int

    @classmethod
    def of_caller(cls) -> Wait:
        """The innermost line outside torch, Triton and this package."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _FOREIGN:
            frame = frame.f_back
        code = frame.f_code
        return cls(code.co_filename, frame.f_lineno, code.co_name, code.co_firstlineno)

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        return f"{PurePath(self.file).name}:{self.line}, `{source}` in {self.function}"


@contextlib.contextmanager
def waits() -> Iterator[list[Wait]]:
    """The lines at which the body waits for the device. ``torch.cuda.set_sync_debug_mode`` warns of these, but not of
    ``torch.cuda.synchronize`` and an event's ``synchronize``, which are replaced in the body."""
    seen: list[Wait] = []
    synchronize, of_event = torch.cuda.synchronize, torch.cuda.Event.synchronize

    def all_streams(device: Any = None) -> None:
        seen.append(Wait.of_caller())
        synchronize(device)

    def event(self: Any) -> None:
        seen.append(Wait.of_caller())
        of_event(self)

    def warned(message: Warning | str, *_: Any, **__: Any) -> None:
        if _SYNCHRONISING in str(message):
            seen.append(Wait.of_caller())

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with (
                holding(torch.cuda, synchronize=all_streams),
                holding(torch.cuda.Event, synchronize=event),
                holding(warnings, showwarning=warned),
            ):
                yield seen
        finally:
            torch.cuda.set_sync_debug_mode(before)
