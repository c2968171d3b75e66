"""What launches tell of a kernel's blocks."""

from __future__ import annotations

from pytest_fusion.interpreter.launch import Constexpr, Launch, likely_blocks


def launch(**constants: Constexpr) -> Launch:
    return Launch("kernel", (1, 1, 1), dict(constants))


def test_blocks_are_constants_that_every_call_uses() -> None:
    """A constant that follows the input's size is in one call only; flags, warps and whole rows are no blocks."""
    calls = [
        [launch(BLOCK=64, WIDTH=size, MASKED=True, WARPS=4, ROW=16384), launch(TILE=16, EPS=32.0, KIND="silu")]
        for size in (8, 40)
    ]

    assert likely_blocks(calls) == [16, 64]


def test_of_many_constants_the_smallest_are_taken() -> None:
    """Sizes around each block are tried, so that there may be few; a call without launches has none."""
    assert likely_blocks([[launch(A=512, B=32, C=128, D=8, E=64)]]) == [8, 32, 64]
    assert likely_blocks([[]]) == []
