"""How many logits exist at a time: the tuned numbers of linear_cross_entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BUFFER = 256 * 2**20  # bytes
STEP = 128  # rows and classes of a chunk are multiples of it, as the tiles of cuBLAS are


@dataclass(frozen=True, slots=True)
class Chunks:
    """Rows whose logits exist at a time, all classes of them; and in a backward that computes them again, classes, of
    all rows."""

    rows: int
    classes: int


def config(rows: int, vocab: int, dtype: torch.dtype, chunk_rows: int | None = None) -> Chunks:
    """The chunks of ``(rows, vocab)`` logits of ``dtype``: what 256 MiB hold, or ``chunk_rows`` rows, and as many
    elements of classes.

    1024 rows of 128256 bfloat16 logits are 250 MiB: 128 tiles of 128 x 256 in the product with a weight of 4096
    columns, one for each of 132 multiprocessors. Products of fewer rows, as Liger-Kernel's 256, read the weight too
    often for what they compute, and round the weight's gradient more often. At least 1024 rows or classes all the
    same, which costs memory only where the other side is longer than 100000.
    """
    if chunk_rows is None:
        room = BUFFER // dtype.itemsize
        tall, wide = (max(8 * STEP, room // max(1, size) // STEP * STEP) for size in (vocab, rows))
    else:
        tall, wide = chunk_rows, max(1, chunk_rows * vocab // max(1, rows))
    return Chunks(max(1, min(tall, rows)), max(1, min(wide, vocab)))
