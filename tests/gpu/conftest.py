"""Kernels of these tests are on the first GPU, whatever else the host has, and their runs of pytest are nobody's CI."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For runs of pytest that a test starts: their kernels do not care which device is current."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])


@pytest.fixture(autouse=True)
def no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a baseline that is missing fails, and a summary is written."""
    for name in ("CI", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
