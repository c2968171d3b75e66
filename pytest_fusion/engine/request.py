"""How a test is to be run, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_fusion.bench.bench_request import BenchRequest
from pytest_fusion.case.case_model import Case
from pytest_fusion.engine.profiles import PROFILES, Profile


@dataclass(frozen=True, slots=True)
class Pinned:
    """A case of a ``fusion_replays`` folder that failed ``check`` on ``made``; a ``recorded`` call may never have."""

    path: str
    case: Case
    made: Mapping[str, Any] = field(default_factory=dict)
    check: str = ""
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """Where and how far a test is run, in any mode; the plugin makes it of the options.

    Replay files go below ``root``. Commands name them and the test (``shown``) relative to ``start``, pytest's start
    folder. ``pinned`` cases run first. ``first``: end at the first failure. ``strict``: hazards fail the test.
    ``sanitize``: repeat the smallest cases under compute-sanitizer. ``bench``: measure ``bench=`` after a pass.
    """

    nodeid: str
    device: str = "cpu"
    # No options, no budget: all cases of the profile run.
    profile: Profile = PROFILES["dev"].counted
    isolate: str = "auto"
    root: Path = field(default_factory=Path.cwd)
    start: Path = field(default_factory=Path.cwd)
    seed: int | None = None
    max_cases: int | None = None
    pinned: tuple[Pinned, ...] = ()
    shown: str = ""
    first: bool = False
    strict: bool = False
    sanitize: bool = False
    bench: BenchRequest | None = None
