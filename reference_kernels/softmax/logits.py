"""What forward and backward of softmax share: one tile of masked logits, what dropout keeps of it, what masks it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from reference_kernels._common import broadcast, jit, widened
from reference_kernels._dropout import odds, philox, seeded_jit, survives

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
    EVICT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The scaled and masked input of one tile in float32, ``-inf`` where it adds nothing; where it was read, and where
    it takes part."""
    read = inside
    if CAUSAL:  # up to a multiple of 16 columns, so that vectors are read whole or not at all
        read = inside & (column < (last // 16 + 1) * 16)
    logits = widened(tl.load(x_row + column * x_step, mask=read, other=0.0, eviction_policy=EVICT)) * scale
    if HAS_BIAS:
        logits += widened(tl.load(bias_row + column * bias_step, mask=read, other=0.0))
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
    first, second, third, fourth = philox(seed, call)
    # join() puts its two side by side in a last dimension: first, second, third, fourth once that is flat.
    words = tl.join(tl.join(first, third), tl.join(second, fourth))
    return survives(tl.reshape(words, [BLOCK_ROWS, BLOCK_COLUMNS]), threshold)


@dataclass(frozen=True, slots=True)
class Masking:
    """What becomes of the logits before and after their softmax, as the launchers hand it on to the kernels."""

    keep: torch.Tensor | None
    bias: torch.Tensor | None
    scale: float
    diagonal: int | None
    seed: int
    p: float

    def as_rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``x``, the mask and the bias in ``x``'s shape; an absent one is stood in for by ``x``, never dereferenced."""
        return (
            x,
            # A bool is a byte; as uint8 it needs no special pointer type.
            x if self.keep is None else broadcast(self.keep.view(torch.uint8), x.shape),
            x if self.bias is None else broadcast(self.bias, x.shape),
        )

    def numbers(self, x: torch.Tensor) -> tuple[float, int, int, int, int, float]:
        """Scale; diagonal, and rows of each matrix that it cuts, if there is one; seed, threshold, factor."""
        threshold, factor = odds(self.p)
        diagonal, queries = (0, 1) if self.diagonal is None else (self.diagonal, x.shape[-2])
        return self.scale, diagonal, queries, self.seed, threshold, factor

    def flags(self) -> dict[str, bool]:
        """What is compiled in; whether there is a bias is not among it, since its own gradient knows."""
        return {"HAS_KEEP": self.keep is not None, "CAUSAL": self.diagonal is not None, "DROPOUT": self.p > 0}
