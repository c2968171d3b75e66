"""Recorded traffic as cases of a spec."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from pytest_fusion.case.model import Case
from pytest_fusion.errors import CanaryError
from pytest_fusion.spec.fusion_spec import FusionSpec

_READER = "pytest_fusion.canary.recording"


def recorded(path: Path, spec: FusionSpec) -> Iterator[Case]:
    """The cases of a recording, each as often as it was called. Raises ``CanaryError`` for a file that is none."""
    if importlib.util.find_spec(_READER) is None:
        raise CanaryError(f"--recording {path}: this version of pytest-fusion cannot read recordings; leave it out")
    if not path.is_file():
        raise CanaryError(f"--recording {path}: there is no such file")
    yield from import_module(_READER).cases(path, spec)
