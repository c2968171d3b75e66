"""What one forked child had to import, the next ones inherit.

A first call of a ``torch.library.custom_op`` imports ``torch._dynamo``: some 2 s that every child would pay again. The
parent learns from the child which of these it needed, and imports them itself.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings

# Slow to import, and safe in a process that must stay free of CUDA and of threads.
_SLOW = ("torch._dynamo", "torch._decomp", "torch._refs", "ml_dtypes", "triton.language.extra")


def needed() -> tuple[str, ...]:
    """Those of the slow modules that this process has imported."""
    return tuple(name for name in _SLOW if name in sys.modules)


_learnt: dict[str, None] = {}


def learn(names: tuple[str, ...]) -> None:
    """Remember what a child needed."""
    _learnt.update(dict.fromkeys(name for name in names if name in _SLOW))


def inherit() -> None:
    """Before the next fork, import what earlier children needed; what cannot be imported here is left out."""
    for name in _learnt:
        if name not in sys.modules:
            with contextlib.suppress(ImportError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)
