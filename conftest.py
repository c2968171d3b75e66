"""For every test in this repository: pytester, and ``gpu`` tests skipped where there is no CUDA device."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    # device_count() asks NVML; is_available() starts CUDA, after which this process can no longer fork for CUDA work.
    if torch.cuda.device_count() == 0:
        pytest.skip("no CUDA device")
