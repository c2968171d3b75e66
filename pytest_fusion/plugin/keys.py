"""The plugin's state on pytest's objects, and readers of these."""

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
# The content of the replay file, if any, read after the import of the tests that it may refer to.
replay: pytest.StashKey[Replay] = pytest.StashKey()
# The files in folders of pinned replays, and a sentence for each of them that no test runs.
pins: pytest.StashKey[list[Pin]] = pytest.StashKey()
orphans: pytest.StashKey[list[str]] = pytest.StashKey()
# The number of cases that a run with --fusion-bench measures.
family = pytest.StashKey[int]()
# Baseline files written at the end.
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
    """A path relative to the folder that pytest was started in."""
    return os.path.relpath(path, config.invocation_params.dir)


def from_start(config: pytest.Config, nodeid: str) -> str:
    """A node id for a command line in the folder that pytest was started in."""
    path, colons, name = nodeid.partition("::")
    return f"{shown(config, config.rootpath / path)}{colons}{name}"
