"""Honest kernels raise no alarm, whatever order they add in and however they split the work."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from pytest_fusion.engine import profiles
from tests.quality.honest import HONEST, NEEDS, PROFILES
from tests.quality.measure import examine_honest, lacking_device
from tests.sweeps import sweep

# As many as show what every case shows; `python -m tests.quality --honest 20000` is the claim.
CASES = 8
# One kernel of each kind: by rows, in place, autotuned, by atomics, in several launches, with a gradient, random, ...
KINDS = (
    "softmax, row in one tile",
    "softmax, declared in place",
    "rms_norm, loop over the row, 1 / sqrt",
    "layer_norm, two kernels",
    "column sum, atomics",
    "row sum, autotuned",
    "linear, split inner dimension",
    "linear by rows, any batch",
    "attention, online",
    "paged decode",
    "quantisation to int8",
    "cross_entropy, online",
    "rope with backward",
    "drop path",
    "running maximum",
    "custom op, size at run time",
    "doubled, 64-bit offsets",
    "scaled, one launch, any layout",
)


def _must_run(name: str) -> None:
    if why := lacking_device(NEEDS.get(name, "")):
        pytest.skip(why)


@sweep("name", list(HONEST), fast=KINDS, rest=pytest.mark.nightly)
def test_honest_kernel_is_not_accused(name: str) -> None:
    """This kernel differs from its reference by rounding alone and passes every case."""
    _must_run(name)
    alarms = examine_honest(name, CASES)
    assert not alarms.accusations, f"{name}: {alarms.accusations[0].message or alarms.accusations[0].checks}"


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(PROFILES))
def test_honest_kernel_passes_its_other_profile(name: str) -> None:
    """What another profile draws, such as offsets beyond 32 bits, is no reason for an alarm either."""
    _must_run(name)
    if PROFILES[name] not in profiles.PROFILES:
        pytest.skip(f"there is no profile {PROFILES[name]!r}")
    alarms = examine_honest(name, CASES, profile=PROFILES[name])
    assert not alarms.accusations, f"{name}: {alarms.accusations[0].message or alarms.accusations[0].checks}"
