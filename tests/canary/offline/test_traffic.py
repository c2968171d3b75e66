"""Recorded traffic for a comparison: a bounded number of cases that stand for all of the calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytest_fusion import canary
from pytest_fusion.canary.recording.recordings import FEWEST_OF_A_CLASS, MOST, recorded
from tests.canary.offline import kernels

SPEC = kernels.SPEC.with_(dims={})


@pytest.mark.parametrize(
    ("classes", "calls", "cases"),
    [(1, 40, 40), (2, 60, MOST), (20, 5, 20 * FEWEST_OF_A_CLASS)],
    ids=["few", "many of a class", "many classes"],
)
def test_a_long_recording_is_as_many_cases_as_can_be_judged(
    classes: int, calls: int, cases: int, tmp_path: Path
) -> None:
    """All calls are stood for, each class of shapes by a few cases at least."""
    recorder = canary.record("k", kernels.right, tmp_path)
    for number in range(classes):
        for _ in range(calls):
            recorder(torch.ones(2 ** (number // 4), 2 ** (number % 4)))
    recorder.close()
    found = recorded(tmp_path, SPEC)

    assert (len(found), found.covered) == (cases, pytest.approx(1.0))
    assert {one.bucket for one in found.found} == {
        f"float32[2^{number // 4},2^{number % 4}]" for number in range(classes)
    }
