"""Other work on the device while a kernel runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pytest_fusion.spec.wording import out_of_memory

# Products of 4096 x 4096 halves: 0.25 ms each on an H100, so that 40 of them outlast the few milliseconds that a
# guarded call takes to be launched.
_SIZE, _PRODUCTS = 4096, 40


@functools.cache
def own_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of competing work, one for all: cuBLAS allocates 32 MB for each stream that it has worked on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def competing(device: torch.device) -> Iterator[None]:
    """Queue matrix products on another stream of ``device`` before the body runs; on a CPU nothing.

    They take multiprocessors, cache and bandwidth away, so that the programs of a kernel run in other groups and at
    other speeds than alone.
    """
    if device.type != "cuda":
        yield
        return
    try:
        factor, product = torch.full((2, _SIZE, _SIZE), 0.5, dtype=torch.float16, device=device).unbind()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        yield
        return
    stream = own_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(_PRODUCTS):
            torch.mm(factor, factor, out=product)
    try:
        yield
    finally:
        stream.synchronize()
