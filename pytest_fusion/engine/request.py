"""How a test is to be run, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fusion.bench.bench_request import BenchRequest
from pytest_fusion.case.case_model import Case
from pytest_fusion.engine.profiles import PROFILES, Profile

if TYPE_CHECKING:
    from pytest_fusion.canary.offline.incumbent.incumbents import Incumbent


@dataclass(frozen=True, slots=True)
class Pinned:
    """A case from a folder ``fusion_replays``: its file as seen from where pytest was started, and where it failed.

    A ``recorded`` one is a call that somebody made; nothing says that it ever failed.
    """

    path: str
    case: Case
    made: Mapping[str, Any] = field(default_factory=dict)
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """How a test is to be run; resolved from options by the plugin.

    Replay files go below ``root``; commands name them, and the test by ``shown``, as seen from ``start``, the folder
    that pytest was started in. ``given`` describes the caller's own arguments where there is nothing to generate.
    ``made`` tells where the case ``replay`` failed, ``cause`` why; ``explained``: what comes of it is to be told, and
    not only whether it fails. ``pinned`` cases run before all others.
    """

    nodeid: str
    device: str = "cpu"
    profile: Profile = field(default_factory=lambda: PROFILES["dev"])
    isolate: str = "auto"
    root: Path = field(default_factory=Path.cwd)
    start: Path = field(default_factory=Path.cwd)
    seed: int | None = None
    max_cases: int | None = None
    replay: Case | None = None
    made: Mapping[str, Any] = field(default_factory=dict)
    cause: str | None = None
    explained: bool = True
    pinned: tuple[Pinned, ...] = ()
    known: tuple[Case, ...] = ()
    shown: str = ""
    given: Mapping[str, Any] | None = None
    # Ask compute-sanitizer afterwards; under it, call the kernel on the cases of this file and judge nothing.
    sanitize: bool = False
    # Measure what bench= names once the test has passed.
    bench: BenchRequest | None = None
    bare: Path | None = None
    # Under ncu: call what this file names and judge nothing.
    profiled: Path | None = None
    # The other kernel that this one is compared with, and nothing else; in its own process, answer for it.
    canary: Incumbent | None = None
    served: bool = False
