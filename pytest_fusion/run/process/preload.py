"""Forked children inherit what an earlier child had to import.

A first call of a ``torch.library.custom_op`` imports ``torch._dynamo``: some 2 s in every child. The child reports
these modules, and the parent imports them.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings

# `torch.autograd.grad` imports it with its first upstream gradient, and sympy: 0.5 s, and 2 s without .pyc files.
GRADIENTS = "torch.fx.experimental.symbolic_shapes"
# Slow to import, and safe in a process that must stay free of CUDA and of threads.
_SLOW = ("torch._dynamo", "torch._decomp", "torch._refs", "ml_dtypes", "triton.language.extra", GRADIENTS)
# A second Triton, to compile what the CPU lane interprets: 0.3 s.
_SECOND_TRITON = "pytest_fusion.run.measure.resources.second_triton"
# Namespaces of torch's own operators.
_TORCH = ("aten::", "prims::", "rngprims::", "prim::", "debug_mode_ops::", "inductor::", "symm_mem::", "torch", "_")


def needed() -> tuple[str, ...]:
    """The slow modules that this process has imported."""
    second = sys.modules.get(_SECOND_TRITON)
    copied = (_SECOND_TRITON,) if second is not None and second.second_triton.cache_info().currsize else ()
    return (*(name for name in _SLOW if name in sys.modules), *copied)


_learnt: dict[str, None] = {}


def learn(names: tuple[str, ...]) -> None:
    """Store what a child needed."""
    _learnt.update(dict.fromkeys(name for name in names if name in _SLOW))


def _custom_operators() -> bool:
    """Whether a ``torch.library.custom_op`` is registered in this process."""
    module = sys.modules.get("torch._library.custom_ops")
    return any(not name.startswith(_TORCH) for name in tuple(getattr(module, "OPDEFS", ())))


def _cached(module: str, name: str) -> None:
    """Calls a private function, if it is there, for what it caches."""
    function = getattr(sys.modules.get(module), name, None)
    if function is not None:
        with contextlib.suppress(Exception):
            function()


def inherit(*, gradients: bool = False, compiles: bool = False, searches: bool = False) -> None:
    """Before the next fork, import what earlier children needed or this one needs; skips what is not available.

    ``gradients``, ``compiles``, ``searches``: it differentiates, compiles Triton kernels, draws cases with Hypothesis.
    """
    if searches:
        # The constants in the source of a project's own modules. A child's first random integer parses them all: 0.1 s
        # with Hypothesis's files of an earlier run, 2 s without. Of 6.168; elsewhere each child does it.
        _cached("hypothesis.internal.conjecture.providers", "_get_local_constants")
    if _custom_operators():
        learn(("torch._dynamo",))
    if gradients:
        learn((GRADIENTS,))
    if compiles:
        # The hash of Triton's own files, part of every name in its cache: 0.3 s a child. Of 3.6.0, 3.7.1 and 3.9.0;
        # elsewhere each child computes it.
        _cached("triton.runtime.cache", "triton_key")
    if _SECOND_TRITON in _learnt:
        with contextlib.suppress(Exception):
            importlib.import_module(_SECOND_TRITON).second_triton()
    for name in _learnt:
        if name not in sys.modules:
            with contextlib.suppress(ImportError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)
