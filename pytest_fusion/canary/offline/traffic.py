"""Recorded traffic as cases of a spec."""

from __future__ import annotations

from pathlib import Path

from pytest_fusion.canary.recording import Cases, cases
from pytest_fusion.errors import CanaryError
from pytest_fusion.spec.fusion_spec import FusionSpec

# A recording keeps 64 calls of each class of shapes, and each case is judged for two kernels by all checks: cases of a
# class differ in strides and values, which the generated cases vary too.
PER_CLASS = 4


def recorded(path: Path, spec: FusionSpec) -> Cases:
    """The cases of a recording, a file or a folder of them, `PER_CLASS` of each class of shapes at most.

    Raises ``CanaryError`` that names the option.
    """
    try:
        return cases(path, spec, per_bucket=PER_CLASS)
    except CanaryError as error:
        raise CanaryError(f"--recording {path}: {error}") from None
