"""Where the errors sit."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_fusion.diagnosis.text.error_map import cells, error_map, marked, picture
from pytest_fusion.diagnosis.text.heat import SCALE, drawing
from pytest_fusion.oracle import OutputLanes
from pytest_fusion.spec.promises import Tolerance


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


def test_a_picture_keeps_the_largest_error_of_each_cell() -> None:
    """Pooling a large output loses no single outlier, and infinity stays infinity."""
    share = torch.full((100, 60), 0.25, dtype=torch.float64)
    share[37, 11], share[99, 59] = 2380.4, math.inf
    found = cells(share, side=10)
    assert (len(found), len(found[0])) == (10, 10)
    assert (found[3][1], found[9][9], found[0][0]) == (2380.0, math.inf, 0.25)
    assert cells(torch.zeros(0, 3)) == []
    assert cells(torch.tensor(2.0)) == [[2.0]]


def lanes(native: torch.Tensor) -> OutputLanes:
    exact = native.double()
    return OutputLanes(native, exact, torch.stack([exact * (1 + k * 2.0**-26) for k in (-2, -1, 0, 1, 2, 3)]))


def test_the_picture_prices_each_element_by_the_lanes() -> None:
    """An element a thousand times further off than another has a cell a thousand times as large; right ones are low."""
    native = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)) + 1
    wrong = native.clone()
    wrong[1, 2] += 1e-3
    wrong[3, 7] += 1.0
    found = picture(("out", wrong, lanes(native)), "auto")
    assert (found["count"], found["total"], found["shape"]) == (2, 32, [4, 8])
    small, large = found["cells"][1][2], found["cells"][3][7]
    assert small > 10
    assert 100 < large / small < 10_000
    assert max(value for row in found["cells"] for value in row if value not in (small, large)) <= 1


def test_a_fixed_tolerance_prices_as_it_says() -> None:
    """With rtol and atol a cell is ``|got - expected| / (atol + rtol * |expected|)``; NaN is infinite."""
    right = torch.tensor([[1.0, 0.0, math.nan, math.inf, 2.0]])
    got = torch.tensor([[1.5, 0.0, 0.0, math.inf, math.nan]])
    found = picture(("out", got, right), Tolerance(rtol=0.01, atol=0.04))
    assert found["cells"] == [[10.0, 0.0, math.inf, 0.0, math.inf]]
    assert found["where"].endswith("axis 1: one index in 2 from 0 on, of 5")
    exact = picture(("out", torch.tensor([1, 2]), torch.tensor([1, 3])), Tolerance())
    assert exact["cells"] == [[0.0, math.inf]]


def test_codes_that_no_lane_has_are_beyond_any_scale() -> None:
    """Of integers and bools nothing is allowed to be off, so a wrong one is infinite."""
    native = torch.tensor([[3, 4, 5]])
    found = picture(
        ("out", torch.tensor([[3, 9, 5]]), OutputLanes(native, native, native[None].repeat(6, 1, 1))), "auto"
    )
    assert found["cells"] == [[0.0, math.inf, 0.0]]


def test_elements_that_differ_in_their_bits_have_a_picture() -> None:
    """Where no error is priced the elements that differ are marked, and their place is told."""
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[2, 1:3] = True
    found = marked("dx", mask)
    assert found["cells"] == [[0.0] * 5, [0.0] * 5, [0.0, math.inf, math.inf, 0.0, 0.0]]
    assert found["where"] == "axis 0: index 2 of 3 (the last); axis 1: indices 1..2 of 5"
    assert (found["count"], found["shape"], found["caption"]) == (2, [3, 5], "elements of dx that differ")


def test_an_error_of_all_elements_together_is_said_to_be_one() -> None:
    """Where no single element is beyond its limit the map does not point anywhere."""
    assert "no single element" in error_map(torch.zeros(3, 3, dtype=torch.bool))["where"]


def drawn(values: list[list[float]], **more: object) -> list[str]:
    return drawing({"cells": values, "scale": SCALE, "shape": [len(values), len(values[0])], **more})


def test_the_drawing_is_logarithmic() -> None:
    """Each decade of eight is one character; within the allowed error is blank and infinity is the last of them."""
    legend, line = drawn([[0.5, 1.0, 2.0, 15.0, 150.0, 1.5e3, 1.5e4, 1.5e5, 1.5e6, 1e8, math.inf]])
    assert line == "|  .:-=+*#%@|"
    assert "1e+08 times" in legend
    assert "'@' none allowed" in legend


def test_a_drawing_is_small_and_says_where() -> None:
    """More rows and columns than fit are pooled by their worst element."""
    values = [[0.1] * 100 for _ in range(40)]
    values[39][50] = 700.0
    legend, *lines = drawn(values, shape=[4000, 10_000])
    assert legend.startswith("4,000 x 10,000, ")
    assert (len(lines), {len(line) for line in lines}) == (16, {50})
    assert [line.strip("| ") for line in lines] == [""] * 15 + ["%"]
    assert lines[-1].index("%") == 1 + 24


@pytest.mark.parametrize(
    "found",
    [
        {"cells": [[5.0]], "scale": SCALE},
        {"cells": [[5.0, 5.0], [5.1, 5.0]], "scale": SCALE},
        {"cells": [[0.5, 0.9]], "scale": SCALE},
        {"cells": [], "scale": SCALE},
        {"cells": [[0.0, 1.0]]},
    ],
    ids=["one element", "all alike", "all within", "empty", "shares of an older file"],
)
def test_a_drawing_that_would_say_nothing_is_left_out(found: dict[str, object]) -> None:
    """One element, one level everywhere, or cells of another meaning make no drawing."""
    assert drawing(found) == []
