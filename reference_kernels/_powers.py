"""Exponentials, and the running maximum and sum of those of rows that take several tiles, by groups of neighbours in a
row.

A group is what a thread loads at once, so threads meet when the row ends, not at each tile. A maximum for every column
would need no groups, but one more exponential an element.
"""

from __future__ import annotations

import triton.language as tl

from reference_kernels._common import jit


@jit
def exponential(x: tl.tensor) -> tl.tensor:
    """`tl.exp` but for results below 2**-126, which are 0 on a GPU: two instructions instead of five, by which `tl.exp`
    scales them. It has the same factor in front, and so the same error."""
    return tl.exp2(x * 1.4426950408889634)


@jit
def grouped(tile: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """``(rows, columns)`` as ``(rows, groups, GROUP)``."""
    return tl.reshape(tile, [tile.shape[0], tile.shape[1] // GROUP, GROUP])


@jit
def finite(top: tl.tensor) -> tl.tensor:
    """What is taken from logits whose maximum is ``top``: -inf - -inf would poison what has seen nothing but -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@jit
def raised(top: tl.tensor, logits: tl.tensor, GROUP: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The groups' maxima, ``(rows, groups)``, with one more tile of logits; what sums of earlier powers are multiplied
    by; and the powers of the new ones, grouped."""
    parts = grouped(logits, GROUP)
    new_top = tl.maximum(top, tl.max(parts, axis=2))
    shift = finite(new_top)
    return new_top, exponential(top - shift), exponential(parts - shift[:, :, None])


@jit
def joined(top: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The maxima of whole rows, ``(rows, 1)``, and what the sums of their groups are multiplied by."""
    whole = tl.max(top, axis=1, keep_dims=True)
    return whole, exponential(top - finite(whole))
