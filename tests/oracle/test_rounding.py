"""Random roundings of one shadow run."""

from __future__ import annotations

import pytest
import torch

from pytest_fusion.oracle.rounding import Noise


@pytest.mark.parametrize("lanes", [0, 1, 6, 24])
def test_one_half_of_the_lanes_is_told_from_the_other(lanes: int) -> None:
    """Two and two take turns, beginning with two of the first half; the oracle belongs to that too."""
    found = Noise(lanes, "E", 0).other_half(torch.zeros(1, 5, 7))
    expected = [False, *([False, False, True, True] * 6)[:lanes]]
    assert found.shape == (1 + lanes, 1, 1)
    assert found.flatten().tolist() == expected


def test_each_half_has_lanes_that_flush_and_lanes_that_do_not() -> None:
    """A value past float16's range is infinite in the other half alone, one below its least step 0 in half of each."""
    noise = Noise(8, "E", 1)
    value = torch.tensor([[70000.0, 4e-8]], dtype=torch.float64)
    large, small = noise.rounded(value, torch.float16).unbind(-1)
    assert (large[0], small[0]) == (70000, 4e-8)
    assert torch.isinf(large).equal(noise.other_half(value).flatten())
    kinds = list(zip(torch.isinf(large[1:]).tolist(), (small[1:] == 0).tolist(), strict=True))
    assert {kind: kinds.count(kind) for kind in kinds} == {
        (False, False): 2,
        (False, True): 2,
        (True, False): 2,
        (True, True): 2,
    }
