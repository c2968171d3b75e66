"""Triton for test modules whose plants are judged on the CPU lane."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fusion import interpreter


def triton_interpreted(why: str) -> Any:
    """Triton with the interpreter on, before the module that calls this makes its kernels; without either the module is
    skipped. ``why``: the reason on a machine with a GPU, where Triton compiles."""
    if torch.cuda.device_count() > 0:
        pytest.skip(why, allow_module_level=True)
    interpreter.enable()
    triton = pytest.importorskip("triton")
    if not interpreter.installed():
        pytest.skip(str(interpreter.problem()), allow_module_level=True)
    return triton
