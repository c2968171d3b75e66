"""Tests of kernels launch them on the CPU, interpreted in this very process, but for those that compile in another one.
On a GPU the kernels are tested by their specs and in ``tests/gpu``."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_ELSEWHERE = "test_compiles.py", "test_resources.py"

if torch.cuda.device_count() > 0 and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = [file.name for file in Path(__file__).parent.glob("test_*.py") if file.name not in _ELSEWHERE]
