"""A GPU to oneself while something is timed on it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """No other worker of a run times on the GPU ``name`` meanwhile; whoever comes second waits."""
    from filelock import FileLock

    with FileLock(Path(tempfile.gettempdir()) / f"pytest-fusion-{name}.lock"):
        yield
