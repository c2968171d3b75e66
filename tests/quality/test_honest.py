"""Honest kernels raise no alarm, whatever order they add in and however they split the work."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.quality.honest import HONEST
from tests.quality.measure import examine_honest

CASES = 13


@pytest.mark.parametrize("name", list(HONEST))
def test_honest_kernel_is_not_accused(name: str) -> None:
    """This kernel differs from its reference by rounding alone and passes every case."""
    alarms = examine_honest(name, CASES)
    assert not alarms.accusations, f"{name}: {alarms.accusations[0].message or alarms.accusations[0].checks}"
