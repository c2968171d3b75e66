"""How batch_norm's kernels see a tensor: rows of one channel after the other, or of all channels, in tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from reference_kernels._common import INTERPRETED, Rows, RowTile, jit

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
    """Memory for a result: dense, its channels in the place of ``x``'s."""
    if is_last(x):
        return torch.empty((x.shape[0], *x.shape[2:], x.shape[1]), dtype=x.dtype, device=x.device).movedim(-1, 1)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@dataclass(frozen=True, slots=True)
class Plan:
    """Tensors ``(batch, channels, *space)`` as rows, and the tiles of each program.

    Program ``(block, part)`` has every ``parts``-th tile of its channels, ``tile.columns`` of them if they are
    ``last``, else one. ``alone``: as far as it can be one tile, since nothing is added up."""

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
        """Arguments of every kernel: parts, tiles, tiles a row, channels, rows, width, and the rows' sizes."""
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


@jit
def place(
    tile: tl.tensor,
    block: tl.tensor,
    column_tiles: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    LAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Rows and columns of a tile (int64), and which of its elements exist. ``LAST``: columns are channels."""
    # Divided in 32 bits, which 64 would take longer for than a tile's loads.
    row = (tile // column_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :].to(tl.int64)
    if LAST:
        column += block * BLOCK_COLUMNS
    else:
        column += (tile % column_tiles).to(tl.int64) * BLOCK_COLUMNS
    return row, column, (row < rows) & (column < width)


@jit
def number_of(
    tile: tl.tensor,
    column_tiles: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    LAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Elements that a tile has of one channel (int64)."""
    number = tl.minimum(rows - (tile // column_tiles).to(tl.int64) * BLOCK_ROWS, BLOCK_ROWS)
    if not LAST:
        number *= tl.minimum(width - (tile % column_tiles).to(tl.int64) * BLOCK_COLUMNS, BLOCK_COLUMNS)
    return number


@jit
def channels_of(block: tl.tensor, LAST: tl.constexpr, BLOCK_COLUMNS: tl.constexpr) -> tl.tensor:
    """A program's channels: one for each column of its tiles, or a single one, ``(1, 1)``."""
    if LAST:
        channel = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :].to(tl.int64)
    else:
        channel = block + tl.zeros([1, 1], tl.int64)
    return channel


@jit
def by_channel(x: tl.tensor, LAST: tl.constexpr) -> tl.tensor:
    """The sums of a tile's elements for each of its channels."""
    found = tl.sum(x, axis=0, keep_dims=True)
    if not LAST:
        found = tl.sum(found, axis=1, keep_dims=True)
    return found


@jit
def statistics_of(
    mean_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    mean_step: tl.tensor,
    scale_step: tl.tensor,
    channel: tl.tensor,
    channels: tl.tensor,
    eps: tl.tensor,
    TRAINING: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Mean, what its rounding left of it, and reciprocal root of the variance; ``scale_ptr`` has the variance itself in
    evaluation."""
    there = channel < channels
    mean = tl.load(mean_ptr + channel * mean_step, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + channel * scale_step, mask=there, other=1.0).to(tl.float32)
    rest = tl.zeros(mean.shape, tl.float32)
    if TRAINING:
        rest = tl.load(rest_ptr + channel, mask=there, other=0.0)
    else:
        scale = tl.rsqrt(scale + eps)
    return mean, rest, scale


def strides_of(plan: Plan) -> tuple[int, ...]:
    """Channel strides and row strides of each of a plan's tensors, in the order of the kernels' arguments."""
    pairs = zip(plan.channel_strides, plan.rows.strides, strict=True)
    return tuple(number for channel, four in pairs for number in (channel, *four))
