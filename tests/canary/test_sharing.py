"""What is drawn for each call: the share of them that is asked for, whatever way it is computed."""

from __future__ import annotations

import pytest

from pytest_fusion.canary import Policy
from pytest_fusion.canary.live.sharing import CallSampler


@pytest.mark.parametrize("share", [0.0, 1e-9, 0.01, 0.5, 1.0])
def test_a_call_is_sampled_by_its_number_alone(share: float) -> None:
    """Many are drawn at once; each is as if drawn alone, in whatever order threads ask, for this share or another."""
    lots = CallSampler("k", "1", Policy())
    tickets = (*range(3000), 10**9, 5, 1023, 1024)
    found = [lots.sampled(ticket, share) for ticket in tickets]
    assert [CallSampler("k", "1", Policy()).sampled(ticket, share) for ticket in tickets] == found
    assert sum(found) == pytest.approx(share * len(tickets), abs=4 * (share * len(tickets)) ** 0.5)
    assert not lots.sampled(3, 0.0)
    assert lots.sampled(3, 1.0)


def test_rollouts_and_blocks_draw_apart() -> None:
    """Calls of another rollout, canary or block are other ones; the sample is no period of 1,024 calls."""
    ours = [CallSampler("k", "1", Policy()).sampled(ticket, 0.5) for ticket in range(2048)]
    assert ours[:1024] != ours[1024:]
    for other in (CallSampler("k", "2", Policy()), CallSampler("m", "1", Policy())):
        assert [other.sampled(ticket, 0.5) for ticket in range(2048)] != ours
