"""Blocks spread over a shape without numpy's own function, and masks looked at without its own either."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pytest_fusion.interpreter.control.batch import broadcast, some

Array = np.ndarray[Any, Any]

BLOCK = np.arange(12).reshape(3, 4)


@pytest.mark.parametrize(
    ("block", "shape"),
    [
        (BLOCK[:, :1], (3, 4)),
        (np.ascontiguousarray(BLOCK[:, :1]), (3, 4)),
        (BLOCK[:1], (3, 4)),
        (BLOCK, (2, 3, 4)),
        (BLOCK.T, (2, 4, 3)),
        (BLOCK.astype(ml_dtypes.bfloat16)[:1], (3, 4)),
        (np.ones((1, 1), np.bool_), (5, 0)),
        (np.array(7), (2, 2)),
    ],
    ids=["a slice", "a column", "a row", "one axis more", "transposed", "bfloat16", "nothing", "a number"],
)
def test_it_is_what_numpy_makes(block: Array, shape: tuple[int, ...]) -> None:
    """Values, shape and dtype, and no copy of them."""
    found = broadcast(block, shape)
    assert found.dtype == block.dtype
    np.testing.assert_array_equal(found, np.broadcast_to(block, shape))
    assert np.may_share_memory(found, block) or not found.size


def test_what_has_the_shape_is_itself() -> None:
    """Most masks and pointers have."""
    assert broadcast(BLOCK, (3, 4)) is BLOCK


@pytest.mark.parametrize("shape", [(3, 5), (4,), (2, 4)])
def test_shapes_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    """With the error that numpy has for it, not with elements of somebody else."""
    with pytest.raises(ValueError, match=r"broadcast|dimensions"):
        broadcast(BLOCK, shape)


@pytest.mark.parametrize("size", [0, 1, 4096, 5000])
def test_one_lane_is_seen_wherever_it_is(size: int) -> None:
    """In few lanes and in many, and none in none."""
    lanes = np.zeros(size, np.bool_)
    assert not some(lanes)
    for place in {0, size // 2, size - 1} if size else ():
        lanes[:] = False
        lanes[place] = True
        assert some(lanes)
