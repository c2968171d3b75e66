"""Exclusive use of a GPU while something is timed on it; otherwise the workers of a run share it.

On an H200, three workers that fuzzed beside a timed case made its interval six times as wide.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch


@contextlib.contextmanager
def alone(what: torch.device | str) -> Iterator[None]:
    """Wait until no work ``beside`` and no other timing runs on the GPU; later ones wait for this body. A name instead
    of a device is another resource that one process of a user has at a time."""
    with _held(what if isinstance(what, str) else _gpu(what), shared=False):
        yield


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Share the GPU in the body with all but ``alone``. Does nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    with _held(_gpu(device), shared=True):
        yield


@contextlib.contextmanager
def _held(name: str, *, shared: bool) -> Iterator[None]:
    """Lock the file ``name`` behind a second lock: otherwise workers that share would never let an exclusive one in."""
    try:
        import fcntl
    except ImportError:  # no Unix, so no forked workers either
        yield
        return
    path = f"{tempfile.gettempdir()}/pytest-fusion-{os.getuid()}-{name}"
    with Path(f"{path}.lock").open("a") as room:
        with Path(f"{path}.door").open("a") as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(room, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # closing would leave the lock to children that inherited the file


def _gpu(device: torch.device) -> str:
    """A name of this GPU that processes of one environment share, whether or not they use it yet."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = device.index or 0
    names = visible.split(",") if visible else []
    return "gpu-" + (names[index].strip().replace("/", "-") if index < len(names) else str(index))
