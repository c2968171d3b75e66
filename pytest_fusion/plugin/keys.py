"""The plugin's state on pytest's objects, and what it reads from them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_fusion.plugin.options import Options
from pytest_fusion.report.record import TestRecord

if TYPE_CHECKING:
    from pytest_fusion.canary.offline.incumbent.incumbents import Incumbent
    from pytest_fusion.diagnosis.repro.replay_file import Replay
    from pytest_fusion.plugin.pinned import Pin

options = pytest.StashKey[Options]()
device = pytest.StashKey[str]()
records = pytest.StashKey[list[TestRecord]]()
own_records = pytest.StashKey[list[TestRecord]]()
# The content of the replay file, where there is one, read after the tests that it may refer to are imported.
replay: pytest.StashKey[Replay] = pytest.StashKey()
# What lies in folders of pinned replays, and a sentence for each file there that no test runs.
pins: pytest.StashKey[list[Pin]] = pytest.StashKey()
orphans: pytest.StashKey[list[str]] = pytest.StashKey()
# How many cases a run with --fusion-bench measures.
family = pytest.StashKey[int]()
# Baseline files that were written at the end.
baselines: pytest.StashKey[list[Path]] = pytest.StashKey()
# Why a report could not be written at the end.
unwritten = pytest.StashKey[str]()
# The incumbent of --fusion-canary.
rival: pytest.StashKey[Incumbent] = pytest.StashKey()


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def is_fused(item: pytest.Item) -> bool:
    return hasattr(getattr(item, "obj", None), "fusion_spec")


def shown(config: pytest.Config, path: Path) -> str:
    """A path as seen from the folder that pytest was started in."""
    return os.path.relpath(path, config.invocation_params.dir)


def from_start(config: pytest.Config, nodeid: str) -> str:
    """A node id as a command line takes it in the folder that pytest was started in."""
    path, colons, name = nodeid.partition("::")
    return f"{shown(config, config.rootpath / path)}{colons}{name}"
