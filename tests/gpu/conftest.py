"""Kernels of these tests are on the first GPU, whatever else the host has."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For runs of pytest that a test starts: their kernels do not care which device is current."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
