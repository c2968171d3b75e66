"""Delays work that a call puts on other streams of a GPU, which shows where it does not wait for that work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_fusion.interpreter.launch import Launch
from pytest_fusion.interpreter.scoped import holding
from pytest_fusion.run.compiled import observe_compiled

# About 10 ms at 2 GHz: far longer than the copy of a result on the caller's stream takes to be made.
_CYCLES = 20_000_000


@contextmanager
def delayed(device: torch.device) -> Iterator[None]:
    """Begin each other stream of ``device`` that the body uses with a pause; without CUDA nothing happens.

    A stream is met when ``torch.cuda.set_stream`` (so ``with torch.cuda.stream``) or a Triton launch selects it; one
    that only C++ knows is not.
    """
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
        torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]

    def set_stream(stream: Any) -> None:
        upstream(stream)
        delay()

    with holding(torch.cuda, set_stream=set_stream), observe_compiled(delay):
        yield
