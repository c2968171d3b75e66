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

# Products of 4096 x 4096 halves: 0.25 ms each on an H100; 40 outlast the few milliseconds of a guarded call's launch.
_SIZE, _PRODUCTS = 4096, 40
# Longer than a small kernel takes on a half of one multiprocessor; then programs that wait for others continue.
_HELD_NS = 10_000_000
_ARRIVED_S = 5e-3
_MOST_LAUNCHES = 8
# The most threads of a program: it leaves a half of a multiprocessor, on some nothing.
_THREADS = 1024


@functools.cache
def _stream(device: torch.device, use: str) -> torch.cuda.Stream:  # noqa: ARG001 - a part of the cache's key
    """One stream for each use: cuBLAS allocates 32 MB for each stream that it uses."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def competing(device: torch.device) -> Iterator[None]:
    """Queue matrix products on another stream of ``device`` before the body runs; does nothing on a CPU. They use
    multiprocessors, cache and bandwidth: a kernel's programs run in other groups and at other speeds."""
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
    stream = _stream(device, "work")
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
    """Fill a CUDA device with idle programs for 10 ms before each of the body's first Triton launches. They leave one
    place for 1024 threads, so the programs of a launch run in small groups: one that reads another's writes, or assumes
    that it is the last, fails. Alone hundreds of them run at once, and 80 short ones end together. For NVIDIA's GPUs,
    whose clock it reads. Raises ``ImportError`` without Triton."""
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
    # The unobserved function: these launches are not the kernel's.
    launch, stream, expected = type(hold).run, _stream(device, "work"), 0

    def fill(_: Launch) -> None:
        nonlocal expected
        # A capture cannot wait for another stream.
        if expected >= _MOST_LAUNCHES * places or torch.cuda.is_current_stream_capturing():
            return
        expected += places
        warps, until = _THREADS // properties.warp_size, time.perf_counter() + _ARRIVED_S
        with torch.cuda.device(device), torch.cuda.stream(stream):
            launch(hold, arrived, _HELD_NS, grid=(places,), warmup=False, num_warps=warps)
        with torch.cuda.stream(_stream(device, "watching")):
            while int(arrived) < expected and time.perf_counter() < until:
                pass

    try:
        with observe_compiled(fill):
            yield
    finally:
        stream.synchronize()


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
            # Never true; but it uses 64 KiB of shared memory. A multiprocessor runs no kernel with shared memory beside
            # programs without, until it is empty, so this one would be alone after the others.
            which = tl.arange(0, 128)
            square = tl.load(arrived + which[:, None] * 128 + which[None, :])
            tl.store(arrived + which[:, None] * 128 + which[None, :], tl.trans(square))

    return triton.jit(hold)
