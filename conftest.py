"""For every test in this repository: pytester, and ``gpu`` tests skipped where there is no CUDA device."""

from __future__ import annotations

import os
import sys

import pytest

pytest_plugins = ["pytester"]

# Workers of pytest-xdist share the cores: threads of OpenMP that wait for each other's core took 15 of a test's 19 s.
# Before torch is imported, and for the processes that tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    # Tests change modules within a second, at the same length, which is all that Python compares a .pyc file by: what
    # is compiled by now is read, and nothing that tests write is kept.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    # device_count() asks NVML; is_available() starts CUDA, after which this process can no longer fork for CUDA work.
    if torch.cuda.device_count() == 0:
        pytest.skip("no CUDA device")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    # Each worker's part follows the files, and some files take a hundred times as long as others: at the end one worker
    # of two was idle for a minute.
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)
