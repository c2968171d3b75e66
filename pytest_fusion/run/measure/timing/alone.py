"""A GPU to oneself while something is timed on it: the workers of a run otherwise share it.

Three workers that fuzzed beside a timed case made its interval six times as wide as alone, on an H200.
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
    """Neither what runs ``beside`` nor what else is timed is on the GPU meanwhile; whoever comes later waits.

    A name instead of a device stands for something else that one process of a user has at a time.
    """
    with _held(what if isinstance(what, str) else _gpu(what), shared=False):
        yield


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Work that others may share the GPU with, but for what is timed ``alone``. Nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    with _held(_gpu(device), shared=True):
        yield


@contextlib.contextmanager
def _held(name: str, *, shared: bool) -> Iterator[None]:
    """Through a door that whoever waits to be alone keeps shut: else workers that share would never let it in."""
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
            fcntl.flock(room, fcntl.LOCK_UN)  # closing would leave it to children that inherited the file


def _gpu(device: torch.device) -> str:
    """The name by which processes of one environment know this GPU, whether or not they have begun to use it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = device.index or 0
    names = visible.split(",") if visible else []
    return "gpu-" + (names[index].strip().replace("/", "-") if index < len(names) else str(index))
