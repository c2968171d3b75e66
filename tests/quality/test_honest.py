"""Honest kernels raise no alarm, whatever order they add in and however they split the work."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from pytest_fusion.engine import profiles
from tests.quality.honest import HONEST, NEEDS, PROFILES
from tests.quality.measure import examine_honest, lacking_device

# As many as show what every case shows; `python -m tests.quality --honest 20000` is the claim.
CASES = 8


def _must_run(name: str) -> None:
    if why := lacking_device(NEEDS.get(name, "")):
        pytest.skip(why)


@pytest.mark.parametrize("name", list(HONEST))
def test_honest_kernel_is_not_accused(name: str) -> None:
    """This kernel differs from its reference by rounding alone and passes every case."""
    _must_run(name)
    alarms = examine_honest(name, CASES)
    assert not alarms.accusations, f"{name}: {alarms.accusations[0].message or alarms.accusations[0].checks}"


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PROFILES))
def test_honest_kernel_passes_its_other_profile(name: str) -> None:
    """What another profile draws, such as offsets beyond 32 bits, is no reason for an alarm either."""
    _must_run(name)
    if PROFILES[name] not in profiles.PROFILES:
        pytest.skip(f"there is no profile {PROFILES[name]!r}")
    alarms = examine_honest(name, CASES, profile=PROFILES[name])
    assert not alarms.accusations, f"{name}: {alarms.accusations[0].message or alarms.accusations[0].checks}"
