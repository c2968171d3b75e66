"""What forward and backward of softmax share: one tile of masked logits, what dropout keeps of it, tensors as rows."""

from __future__ import annotations

import torch
import triton.language as tl

from reference_kernels._common import jit
from reference_kernels._dropout import seeded_jit, survives

# The diagonal of attention to a growing cache moves with every token.
masked_jit = seeded_jit("diagonal")


@jit
def masked_logits(
    x_row: tl.tensor,
    keep_row: tl.tensor,
    bias_row: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    last: tl.tensor,
    scale: tl.tensor,
    x_step: tl.tensor,
    keep_step: tl.tensor,
    bias_step: tl.tensor,
    HAS_KEEP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The scaled and masked input of one tile in float32, ``-inf`` where it adds nothing; where it was read, and where
    it takes part."""
    read = inside
    if CAUSAL:  # up to a multiple of 16 columns, so that vectors are read whole or not at all
        read = inside & (column < (last // 16 + 1) * 16)
    logits = tl.load(x_row + column * x_step, mask=read, other=0.0).to(tl.float32) * scale
    if HAS_BIAS:
        logits += tl.load(bias_row + column * bias_step, mask=read, other=0.0).to(tl.float32)
    seen = inside
    if HAS_KEEP:
        seen = seen & (tl.load(keep_row + column * keep_step, mask=read, other=0) != 0)
    if CAUSAL:
        seen = seen & (column <= last)
    return tl.where(seen, logits, float("-inf")), read, seen


@jit
def surviving(
    row: tl.tensor,
    start: tl.tensor,
    width: tl.tensor,
    seed: tl.tensor,
    threshold: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> tl.tensor:
    """What dropout keeps of ``BLOCK_COLUMNS`` columns from ``start`` on, a multiple of 4.

    One call of Philox decides about four neighbours, by row and column alone: rows begin with a call of their own.
    """
    call = row * ((width + 3) // 4) + start // 4 + tl.arange(0, BLOCK_COLUMNS // 4)[None, :]
    first, second, third, fourth = tl.randint4x(seed, call)
    # join() puts its two side by side in a last dimension: first, second, third, fourth once that is flat.
    words = tl.join(tl.join(first, third), tl.join(second, fourth))
    return survives(tl.reshape(words, [BLOCK_ROWS, BLOCK_COLUMNS]), threshold)


def as_rows(
    x: torch.Tensor, keep: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three in ``x``'s shape; an absent one is stood in for by ``x``, never dereferenced."""
    return (
        x,
        # A bool is a byte; as uint8 it needs no special pointer type.
        x if keep is None else keep.view(torch.uint8).broadcast_to(x.shape),
        x if bias is None else bias.broadcast_to(x.shape),
    )


def triangle(x: torch.Tensor, diagonal: int | None) -> tuple[int, int]:
    """The diagonal, and the rows of each matrix that it cuts: the kernels' numbers, unused where there is none."""
    return (0, 1) if diagonal is None else (diagonal, x.shape[-2])
