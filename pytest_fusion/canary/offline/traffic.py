"""Recorded traffic as cases of a spec."""

from __future__ import annotations

from pathlib import Path

from pytest_fusion.canary.recording import Cases, cases
from pytest_fusion.errors import CanaryError
from pytest_fusion.spec.fusion_spec import FusionSpec


def recorded(path: Path, spec: FusionSpec) -> Cases:
    """The cases of a recording, a file or a folder of them. Raises ``CanaryError`` that names the option."""
    try:
        return cases(path, spec)
    except CanaryError as error:
        raise CanaryError(f"--recording {path}: {error}") from None
