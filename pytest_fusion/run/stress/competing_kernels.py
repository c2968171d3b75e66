"""Other work on the device while a kernel runs: beside it, or in its way, which changes the order of its programs."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_fusion.interpreter.launch import Launch
from pytest_fusion.run.compiled import observe_compiled
from pytest_fusion.spec.wording import out_of_memory

# Products of 4096 x 4096 halves: 0.25 ms each on an H100, so that 40 of them outlast the few milliseconds that a
# guarded call takes to be launched.
_SIZE, _PRODUCTS = 4096, 40
# Longer than a small kernel takes that has a half of one multiprocessor; programs that wait for others to run beside
# them go on then.
_HELD_NS = 10_000_000
_ARRIVED_S = 5e-3
_MOST_LAUNCHES = 8
# The most threads that a program has: what is left of a multiprocessor is a half, or on some nothing.
_THREADS = 1024


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


@contextmanager
def crowded(device: torch.device) -> Iterator[None]:
    """Before each of Triton's first launches inside programs that do nothing take all of a CUDA device but one place
    for 1024 threads, for 10 ms.

    The programs of a launch then run one small group after the other: who reads what another program writes, or takes
    itself for the last one, finds that it was not. Alone hundreds of them run at once, and 80 short ones end together.
    For NVIDIA's GPUs, whose clock it reads. Raises ``ImportError`` without Triton.
    """
    hold, properties = _hold(), torch.cuda.get_device_properties(device)
    places = properties.multi_processor_count * (properties.max_threads_per_multi_processor // _THREADS) - 1
    try:
        arrived = torch.zeros(1, dtype=torch.int32, device=device)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        yield
        return
    torch.cuda.current_stream(device).synchronize()
    # As it is before anybody observes launches: these are none of the kernel's.
    launch, stream, expected = type(hold).run, own_stream(device), 0

    def fill(_: Launch) -> None:
        nonlocal expected
        # A capture allows no other stream to be waited for.
        if expected >= _MOST_LAUNCHES * places or torch.cuda.is_current_stream_capturing():
            return
        expected += places
        warps, until = _THREADS // properties.warp_size, time.perf_counter() + _ARRIVED_S
        with torch.cuda.device(device), torch.cuda.stream(stream):
            launch(hold, arrived, _HELD_NS, grid=(places,), warmup=False, num_warps=warps)
        with torch.cuda.stream(_watching(device)):
            while int(arrived) < expected and time.perf_counter() < until:
                pass

    try:
        with observe_compiled(fill):
            yield
    finally:
        stream.synchronize()


@functools.cache
def _watching(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@functools.cache
def _hold() -> Any:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import globaltimer

    def hold(arrived: tl.tensor, nanoseconds: tl.tensor) -> None:
        tl.atomic_add(arrived, 1)
        begin = globaltimer()
        now = begin
        while now - begin < nanoseconds:
            now = globaltimer()
        if nanoseconds < 0:
            # Never; but it asks for 64 KiB of shared memory. Beside programs that have none a multiprocessor runs no
            # kernel that has some until it is empty, and this one would be alone when the others are gone.
            which = tl.arange(0, 128)
            square = tl.load(arrived + which[:, None] * 128 + which[None, :])
            tl.store(arrived + which[:, None] * 128 + which[None, :], tl.trans(square))

    return triton.jit(hold)
