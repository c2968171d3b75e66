"""What is drawn for each call: the share of them that is asked for, whatever way it is computed."""

from __future__ import annotations

import pytest

from pytest_fusion.canary import Policy
from pytest_fusion.canary.live.sharing import CallSampler, elements, threshold
from pytest_fusion.case import counter_random


@pytest.mark.parametrize("share", [0.0, 1e-9, 0.01, 0.5, 1.0])
def test_a_call_is_sampled_where_its_number_is_below_the_threshold(share: float) -> None:
    """Many are drawn at once; each is as if drawn alone, in whatever order threads ask, for this share or another."""
    lots = CallSampler("k", "1", Policy())
    for ticket in (*range(3000), 10**9, 5, 1023, 1024):
        assert lots.sampled(ticket, share) == (counter_random.element(lots.sample, ticket) < threshold(share))
    assert not lots.sampled(3, 0.0)
    assert lots.sampled(3, 1.0)


@pytest.mark.parametrize("seed", [0, 1, (1 << 64) - 1, 0x9E3779B97F4A7C15])
def test_many_numbers_at_once_are_those_one_by_one(seed: int) -> None:
    """Wherever in the stream they begin, also where its state wraps around."""
    for first in (0, 1, 12_345, 1 << 40):
        found = elements(seed, first, 50).tolist()
        assert found == [counter_random.element(seed, first + i) for i in range(50)]
