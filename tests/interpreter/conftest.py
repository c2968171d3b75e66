"""These tests interpret Triton in this very process, which a process that compiles for a GPU cannot do."""

from __future__ import annotations

import os

import torch

if torch.cuda.device_count() > 0 and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
