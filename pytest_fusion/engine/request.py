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
    """A case from a folder ``fusion_replays``: its file as seen from where pytest was started, and where it failed.

    ``check`` is the one that it failed; a ``recorded`` one is a call of a user, and nothing says that it ever failed.
    """

    path: str
    case: Case
    made: Mapping[str, Any] = field(default_factory=dict)
    check: str = ""
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """Where and how far a test is run, whatever its mode; resolved from options by the plugin.

    Replay files go below ``root``; commands name them, and the test by ``shown``, as seen from ``start``, the folder
    that pytest was started in. ``pinned`` cases run before all others. ``first``: end at the first failure. ``strict``:
    hazards fail the test. ``sanitize``: run the smallest cases again under compute-sanitizer. ``bench``: measure what
    ``bench=`` names once the test has passed.
    """

    nodeid: str
    device: str = "cpu"
    profile: Profile = field(default_factory=lambda: PROFILES["dev"])
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
