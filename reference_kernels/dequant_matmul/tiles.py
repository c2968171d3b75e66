"""The tuned numbers of dequant_matmul: tiles, and into how many parts the sum over k is split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import triton

from reference_kernels._common import INTERPRETED
from reference_kernels.linear.products import MatmulTile

Kind = Literal["int8", "int8 words", "int4", "fp8"]
FEW = 64  # rows up to which memory bounds the product: a weight is then read faster than it is multiplied
FEWEST = 16  # rows that fill the narrow side of an instruction; half as many fill that of half its width
LEAST = 1024  # products of a part at the least, so that a part costs more to compute than to add


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows ``n`` of the weight, rows ``m`` of the input and products ``k`` of a step (powers of two, at least 16),
    warps, pipeline stages; into how many parts the sum over ``k`` is split, and how many blocks of ``n`` share one of
    ``m``."""

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
    """The tile for ``rows`` times a weight of ``columns x depth`` codes of ``kind``; int4's steps are whole groups.

    The weight is the first operand, so that few rows fill the narrow side of a tensor-core instruction and not an
    eighth of its wide one, and codes become its operand without leaving the registers. Up to 16 rows take two warps,
    which multiply by ``mma.sync``. Where the weight has too few rows to fill the GPU, its columns are shared out too.
    Tiles for 1, 16 and 512 rows and 8192 x 28672 codes were timed, on an H200 (see the card), and none for 17 to 64
    rows. A weight of other sizes has the same tiles, in parts until there are as many programs for each multiprocessor.
    Many rows of int4 keep the sum of a group beside the whole sum, which takes as many registers again.
    """
    if interpreted:
        k = group * (2 if rows <= FEWEST // 2 else 1) if kind == "int4" else 16 if depth <= 128 else 128
        m = 16 if rows <= FEWEST else 32
        splits = 1 if kind == "int8 words" else max(1, min(3, triton.cdiv(depth, k)))
        return Tile(32, m, k, warps=4, stages=1, splits=splits)
    if rows > FEW:
        return {
            "int8": Tile(128, 128, 64, warps=8, stages=3),
            "int8 words": Tile(128, 128, 32, warps=8, stages=3),
            "int4": Tile(64, 128, group, warps=4, stages=3),
            "fp8": Tile(128, 128, 128, warps=8, stages=4),
        }[kind]
    m = max(8 if kind != "fp8" else 16, triton.next_power_of_2(rows))
    # Programs for each of 132 multiprocessors, at the least.
    if rows > FEWEST or kind == "fp8":
        tile, programs = Tile(64, m, group if kind == "int4" else 128, warps=4, stages=5), 4
    elif kind != "int4":
        tile, programs = Tile(64, m, 256, warps=2, stages=3), 3
    elif m == FEWEST:
        tile, programs = Tile(64, m, group, warps=2, stages=3), 27
    else:
        tile, programs = Tile(32, m, 2 * group, warps=2, stages=3), 6
    wanted = triton.cdiv(programs * 132, max(1, triton.cdiv(columns, tile.n)))
    return replace(tile, splits=max(1, min(wanted, depth // LEAST)))


def config_float8(rows: int, depth: int, *, interpreted: bool = INTERPRETED) -> MatmulTile | None:
    """The tile for many rows in float8 by descriptors, ``None`` for few. At 8192**3 on an H200 it took 1039 us,
    `torch._scaled_mm` 837; 256 x 128 for 8 warps 1317 to 1329."""
    if interpreted:
        return MatmulTile(32, 32, 16 if depth <= 128 else 128, warps=4, stages=1, parts=2, resident=1)
    return MatmulTile(128, 128, 128, warps=4, stages=3, group=16, parts=2, resident=2) if rows > FEW else None
