"""The tuned numbers of dequant_matmul: tiles, and into how many parts the sum over k is split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import triton

from reference_kernels._common import INTERPRETED
from reference_kernels.linear.products import MatmulTile

Kind = Literal["int8", "int8 words", "int4", "fp8"]
FEW = 64  # rows up to which memory bounds the product: a weight is then read faster than it is multiplied
FEWEST = 16  # rows up to which int8 is read a code at a time and multiplied by two warps; int4 up to half as many
LEAST = 1024  # products of a part at the least, so that a part costs more to compute than to add


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows ``n`` of the weight, rows ``m`` of the input and products ``k`` of a step (powers of two, at least 16, but
    for 8 rows), warps, pipeline stages; into how many parts the sum over ``k`` is split, and how many blocks of
    ``n`` share one of ``m``."""

    n: int
    m: int
    k: int
    warps: int
    stages: int
    splits: int = 1
    group: int = 8


def config(
    rows: int, columns: int, depth: int, kind: Kind, group: int = 128, *, interpreted: bool = INTERPRETED
) -> Tile:
    """The tile for ``rows`` times a weight of ``columns x depth`` codes of ``kind``; a step of int4 is a group.

    The weight is the first operand, so that few rows fill the narrow side of a tensor-core instruction and not an
    eighth of its wide one, and codes become its operand without leaving the registers. Two warps multiply by
    ``mma.sync``, four by ``wgmma``, as int4 does from 9 rows on and int8, in words, from 17. Where the weight has too
    few rows to fill the GPU, its columns are shared out too.

    Tiles for 1, 8, 16, 32, 64 and 512 rows and 8192 x 28672 codes were tuned, on H200s. A weight of
    other sizes has the same tiles, in parts until there are as many programs for each multiprocessor. Many rows of int4
    keep the sum of a group beside the whole sum, which takes as many registers again.
    """
    m = triton.next_power_of_2(rows)
    if interpreted:
        # A product of float8 takes at least 32 at a time.
        k = group if kind == "int4" else 128 if depth > 128 else 32 if kind == "fp8" else 16
        return Tile(32, min(max(8, m), 32), k, warps=4, stages=1, splits=max(1, min(3, triton.cdiv(depth, k))))
    if rows > FEW:
        return {
            "int8": Tile(128, 128, 64, warps=8, stages=3),
            "int8 words": Tile(128, 128, 32, warps=8, stages=3),
            "int4": Tile(64, 128, group, warps=4, stages=3),
            "fp8": Tile(128, 128, 128, warps=8, stages=4),
        }[kind]
    # Programs for each of 132 multiprocessors, at the least.
    if kind == "int8 words":
        tile, programs = Tile(128, m, 64, warps=8, stages=4), 1
    elif kind == "int4" and rows > FEWEST:
        tile, programs = Tile(64, m, group, warps=4, stages=3), 4
    elif kind == "int4" and rows > 8:
        tile, programs = Tile(128, 16, group, warps=4, stages=3), 13
    elif kind == "int4":
        tile, programs = Tile(64, 8, group, warps=2, stages=3), 27
    elif rows > FEWEST or kind == "fp8":
        tile, programs = Tile(64, max(16, m), 128, warps=4, stages=5), 4
    else:
        tile, programs = Tile(64, max(8, m), 256, warps=2, stages=3), 3
    wanted = triton.cdiv(programs * 132, max(1, triton.cdiv(columns, tile.n)))
    return replace(tile, splits=max(1, min(wanted, depth // LEAST)))


def config_float8(rows: int, depth: int, *, interpreted: bool = INTERPRETED) -> MatmulTile | None:
    """The tile for many rows in float8 by descriptors, ``None`` for few."""
    if interpreted:
        return MatmulTile(32, 32, 32 if depth <= 128 else 128, warps=4, stages=1, parts=2, resident=1)
    return MatmulTile(128, 128, 128, warps=4, stages=3, group=16, parts=2, resident=2) if rows > FEW else None
