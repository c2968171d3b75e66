"""How batch_norm's kernels see a tensor: rows of one channel after the other, or of all channels, in tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from reference_kernels._common import INTERPRETED, Rows, RowTile

PROGRAMS = 1056  # eight for each multiprocessor of an H200; a constant, so that sums have the same bits on every device
MOST_PARTS = 65535  # of CUDA's second dimension of a grid


def config(
    width: int, last: bool, backward: bool = False, alone: bool = False, *, interpreted: bool = INTERPRETED
) -> RowTile:
    """Tile for rows of ``width`` elements: up to 1024 neighbours of a channel, 32 elements a thread, or 64 channels, 8
    elements a thread. ``backward`` reads two or three tensors at once: half of that, and twice. A tile ``alone`` in its
    program has up to 4096 neighbours or 256 channels, 16 elements a thread."""
    # Small where interpreted, so that cases of few elements take several tiles.
    if interpreted:
        elements, widest = (512, 16) if width <= 256 else (2048, 64 if last else 512)
    elif backward:
        elements, widest = 2048, 64 if last else 512
    elif alone:
        elements, widest = (2048, 256) if last else (4096, 4096)
    else:
        elements, widest = (1024, 64) if last else (4096, 1024)
    columns = min(widest, max(16, triton.next_power_of_2(width)))
    warps = 1 if interpreted else max(4, elements // 512) if alone else 4
    return RowTile(elements // columns, columns, warps, loop=True)


def is_last(x: torch.Tensor) -> bool:
    """Whether channels are neighbours in memory, as in ``channels_last`` and without space."""
    return x.ndim == 2 or (x.stride(1) == 1 and x.shape[1] > 1)


def like(x: torch.Tensor) -> torch.Tensor:
    """Memory for a result: dense, its channels where those of ``x`` lie."""
    if is_last(x):
        return torch.empty((x.shape[0], *x.shape[2:], x.shape[1]), dtype=x.dtype, device=x.device).movedim(-1, 1)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@dataclass(frozen=True, slots=True)
class Plan:
    """Tensors ``(batch, channels, *space)`` as rows, and who takes which tiles: program ``(block, part)`` has every
    ``parts``-th tile of its channels, ``tile.columns`` of them if they are ``last``, else one. ``alone``: as far as it
    can be one tile, since nothing is added up."""

    rows: Rows
    channel_strides: tuple[int, ...]
    channels: int
    last: bool
    tile: RowTile
    alone: bool

    @property
    def blocks(self) -> int:
        return triton.cdiv(self.channels, self.tile.columns) if self.last else self.channels

    @property
    def column_tiles(self) -> int:
        return 1 if self.last else triton.cdiv(self.rows.width, self.tile.columns)

    @property
    def tiles(self) -> int:
        return triton.cdiv(self.rows.count, self.tile.rows) * self.column_tiles

    @property
    def parts(self) -> int:
        if INTERPRETED:
            most = 3
        else:
            most = MOST_PARTS if self.alone else max(1, PROGRAMS // self.blocks)
        return min(self.tiles, most)

    def folded(self, itemsize: int) -> bool:
        """Whether a row of a tile is at least as wide as all threads with 16 bytes each, so that each holds its columns
        of every row."""
        return not self.last and self.tile.columns * itemsize >= 512 * self.tile.warps

    @property
    def numbers(self) -> tuple[int, ...]:
        """What every kernel is told: parts, tiles, tiles a row, channels, rows, width, and the rows' sizes."""
        rows = self.rows
        return self.parts, self.tiles, self.column_tiles, self.channels, rows.count, rows.width, *rows.sizes[1:]


def plan_of(*tensors: torch.Tensor, backward: bool = False, alone: bool = False) -> Plan:
    """The plan of tensors of one shape of 2 to 5 dimensions, with at least one element; the first one decides whose
    neighbours are read together. Tensors are copied where their dimensions do not fold into three. ``backward`` and
    ``alone`` as in `config`."""
    x = tensors[0]
    channels = x.shape[1]
    if is_last(x):
        rows = Rows.of(*(tensor.movedim(1, -1) for tensor in tensors))
        return Plan(rows, (0,) * len(tensors), channels, True, config(channels, True, backward, alone), alone)
    if x.ndim > 3:
        try:  # space in one piece, unless a tensor has gaps there
            shape = (*x.shape[:2], math.prod(x.shape[2:]))
            tensors = tuple(tensor.view(shape) for tensor in tensors)
        except RuntimeError:
            pass
    # Channel 0 alone: at most three dimensions before the last, which always fold, so nothing is copied here.
    rows = Rows.of(*(tensor.select(1, 0) for tensor in tensors))
    strides = tuple(tensor.stride(1) for tensor in tensors)
    return Plan(rows, strides, channels, False, config(rows.width, False, backward, alone), alone)
