"""Where the errors sit."""

from __future__ import annotations

import pytest
import torch

from pytest_fusion.diagnosis.error_map import cells, error_map


def wrong(shape: tuple[int, ...], *places: object) -> torch.Tensor:
    mask = torch.zeros(shape, dtype=torch.bool)
    for place in places:
        mask[place] = True  # type: ignore[index]
    return mask


@pytest.mark.parametrize(
    ("mask", "where"),
    [
        (wrong((4, 6), (slice(None), 5)), "axis 0: every index; axis 1: index 5 of 6 (the last)"),
        (wrong((4, 6), (2, slice(0, 3))), "axis 0: index 2 of 4; axis 1: indices 0..2 of 6 (the start)"),
        (wrong((9,), 1, 3, 5, 7), "axis 0: one index in 2 from 1 on, of 9"),
        (wrong((9,), 0, 1, 4), "axis 0: 3 of 9 indices (0..1, 4)"),
        (wrong((3, 3), ...), "everywhere"),
        (torch.tensor(True), "everywhere"),
    ],
    ids=["last column", "start of a row", "every other", "scattered", "all", "0-d"],
)
def test_the_map_says_where(mask: torch.Tensor, where: str) -> None:
    """Columns, rows, strides and scattered places are told in words; the counts agree."""
    found = error_map(mask)
    assert found["where"] == where
    assert (found["count"], found["total"]) == (int(mask.sum()), mask.numel())


def test_the_picture_holds_the_share_of_wrong_elements() -> None:
    """A picture of at most ``side`` cells each way keeps the mean of the mask, whatever its size."""
    mask = wrong((100, 60), slice(0, 50))
    picture = cells(mask, side=10)
    assert (len(picture), len(picture[0])) == (10, 10)
    assert picture[0] == [1.0] * 10
    assert picture[-1] == [0.0] * 10
    assert cells(wrong((0, 3))) == []
    assert cells(torch.tensor(True)) == [[1.0]]
    assert cells(wrong((2,), 1)) == [[0.0, 1.0]]
