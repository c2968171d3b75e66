"""Recorded traffic as cases of a spec."""

from __future__ import annotations

from pathlib import Path

from pytest_fusion.canary.recording.recordings import Cases, cases
from pytest_fusion.errors import CanaryError
from pytest_fusion.spec.fusion_spec import FusionSpec

# A recording keeps 64 calls of each of up to 256 classes of shapes, and each case is judged for two kernels by all
# checks. Cases of one class differ in strides and values, which the generated cases vary too.
MOST, FEWEST_OF_A_CLASS = 64, 4


def recorded(path: Path, spec: FusionSpec) -> Cases:
    """The cases of a recording, a file or a folder of them: `MOST`, or a few of each class of shapes if that is more.

    Raises ``CanaryError`` that names the option.
    """
    try:
        found = cases(path, spec)
        if len(found) <= MOST:
            return found
        classes = len({one.bucket for one in found.found})
        return cases(path, spec, per_bucket=max(FEWEST_OF_A_CLASS, MOST // classes))
    except CanaryError as error:
        raise CanaryError(f"--recording {path}: {error}") from None
