"""Interprets kernels that were made to be compiled, in a child process that examines a GPU's failure."""

from __future__ import annotations

import gc
import importlib
import os
from typing import Any

from pytest_fusion.interpreter.bridge.hook import install

# `triton.jit` passes these to the interpreted function; the compiled one has them as attributes.
_OPTIONS = ("version", "do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline", "launch_metadata")


def adopt() -> None:
    """Turn every kernel of this process into what ``triton.jit`` makes with ``TRITON_INTERPRET=1``, and hide all GPUs.

    For a forked child that has not started CUDA and computes nothing else. Objects stay the same, for all that refer to
    them (autotuners, globals). Raises ``UnsupportedTritonError`` if the installed Triton cannot be interpreted.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    install()
    compiled: Any = importlib.import_module("triton.runtime.jit").JITFunction
    interpreted: Any = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
    # An object's class can change to a subclass only: the two classes have different layouts.
    own = {name: value for name, value in vars(interpreted).items() if name not in ("__dict__", "__weakref__")}
    adopted: Any = type("AdoptedFunction", (compiled, interpreted), own)
    gc.unfreeze()  # objects frozen before the fork are not listed
    for kernel in gc.get_objects():
        # Subclasses are Gluon's, whose language is not interpreted.
        if type(kernel) is compiled:
            twin = interpreted(kernel.fn, **{name: getattr(kernel, name, None) for name in _OPTIONS})
            kernel.__class__ = adopted
            kernel.__dict__.clear()
            kernel.__dict__.update(twin.__dict__)
