"""Whether a call is captured into a CUDA graph or traced, and so happens once for many."""

from __future__ import annotations

import torch


def recorded() -> bool:
    """Whether what is done now is done for every replay."""
    if torch.compiler.is_compiling():
        return True
    started = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()
