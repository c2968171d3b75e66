"""Triton kernels on the CPU: switch Triton's interpreter on and mend what it computes wrongly.

Importing this package imports neither Triton nor torch; ``enable()`` is called before user modules are imported and
everything else happens when they import Triton. What is mended, and which hardware behaviour it follows, is told by
the module that does it: ``casts``, ``arith``, ``reductions``, ``libdevice``, ``transfers``, ``atomics``, ``scalars``,
``rewrite``, ``control``, ``autotune``, ``device``. How launches run is told by ``executor`` and ``batch``, which need
not be computed again by ``replay``, what is watched by ``access``, ``tracking``, ``races`` and ``hints``.
"""

from __future__ import annotations

from pytest_fusion.run.interpreter.autotune import TunedKernel, autotuned_kernels, force_config
from pytest_fusion.run.interpreter.hook import enable, install, installed, problem, version
from pytest_fusion.run.interpreter.observers import notes, observe

__all__ = [
    "TunedKernel",
    "autotuned_kernels",
    "enable",
    "force_config",
    "install",
    "installed",
    "notes",
    "observe",
    "problem",
    "version",
]
