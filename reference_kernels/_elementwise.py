"""What the kernels without a reduction share: tiles for rows that take several programs, their place, the launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from reference_kernels._common import INTERPRETED, Rows, RowTile, jit, placed


def tile_of(
    width: int, dtype: torch.dtype, *, loads: int = 2, rows: int = 1, interpreted: bool = INTERPRETED
) -> RowTile:
    """Tile for rows of ``width`` elements of ``dtype``; a row wider than the tile takes several programs.

    ``loads`` of 16 bytes for each thread and tensor: two are enough under way to hide memory, and few enough registers
    for full occupancy. At least ``rows`` rows, which share what there is once for each column. Interpreted, tiles are
    small, so that the sizes of most cases (33 and less) take several both ways.
    """
    warps = 4
    if interpreted:
        elements, widest = (256, 16) if width <= 64 else (4096, 128) if width <= 512 else (4096, 1024)
    else:
        elements = warps * 32 * loads * 16 // dtype.itemsize
        widest = elements // rows
    columns = min(widest, max(16, triton.next_power_of_2(width)))
    return RowTile(elements // columns, columns, warps, loop=False)


@jit
def place(
    column_blocks: tl.tensor, FLAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The rows and columns of this program (int64). ``FLAT``: there is one row, which the compiler then knows."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
    column = tl.arange(0, BLOCK_COLUMNS)[None, :].to(tl.int64)
    if FLAT:
        column += program * BLOCK_COLUMNS
    else:
        row += program // column_blocks * BLOCK_ROWS
        column += program % column_blocks * BLOCK_COLUMNS
    return row, column


def launch(
    kernel: Any, out: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...], *extra: int, **constants: Any
) -> None:
    """``kernel`` on tensors of one shape, at least one element; as a single row where all of them are contiguous,
    which spares narrow and odd rows their tails. ``extra`` numbers come after the tensors, ``constants`` by name."""
    flat = all(tensor.is_contiguous() for tensor in (*out, *inputs))
    rows = Rows.of(*(tensor.view(-1) for tensor in inputs) if flat else inputs)
    tile = tile_of(rows.width, out[0].dtype)
    blocks = triton.cdiv(rows.width, tile.columns)
    with placed(out[0].device):
        kernel[(triton.cdiv(rows.count, tile.rows) * blocks,)](
            *out,
            *rows.tensors,
            *extra,
            rows.count,
            rows.width,
            blocks,
            *rows.layout,
            FLAT=flat,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
            **constants,
        )
