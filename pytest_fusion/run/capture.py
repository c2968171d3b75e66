"""One call captured in a CUDA graph after warm-up calls; a failed capture leaves nothing behind."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from pytest_fusion.run import pristine

T = TypeVar("T")

# Torch's notes on CUDA graphs make as many calls before a capture: they tune, compile and fill caches.
WARM_UPS = 3


class CaptureFailed(Exception):
    """A call that otherwise works raised during its capture; the exception is the cause."""


def captured(
    call: Callable[[int], T], device: torch.device, *, prepare: Callable[[], None] | None = None, keep: bool = False
) -> tuple[Any, T]:
    """The ``torch.cuda.CUDAGraph`` and the result of ``call(WARM_UPS)``, after ``call(0)`` to ``call(2)``. ``prepare``
    runs before each, uncaptured. ``keep`` makes the graph's nodes readable; work on streams that do not wait for the
    current one is not among them. Raises `CaptureFailed`, and what a warm-up call raises."""
    prepare = prepare or (lambda: None)
    pristine.synchronize(device)
    with torch.cuda.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for turn in range(WARM_UPS):
                prepare()
                call(turn)
            prepare()
        torch.cuda.current_stream(device).wait_stream(side)
        pristine.synchronize(device)
        graph = torch.cuda.CUDAGraph(keep_graph=True) if keep else torch.cuda.CUDAGraph()
        try:
            with _put_back(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = call(WARM_UPS)
        except Exception as error:
            raise CaptureFailed(str(error)) from error
    return graph, result


@contextlib.contextmanager
def _put_back(device: torch.device) -> Iterator[None]:
    """Restore stream and generators: after a failed capture a draw raises "Offset increment outside graph capture"."""
    try:
        with torch.cuda.stream(torch.cuda.current_stream(device)):
            yield
    except Exception:
        with contextlib.suppress(RuntimeError):
            pristine.synchronize(device)
        with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            pass
        raise
