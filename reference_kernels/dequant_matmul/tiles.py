"""The tuned numbers of dequant_matmul: tiles, and into how many parts the sum over k is split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import triton

from reference_kernels._common import INTERPRETED
from reference_kernels.linear.products import MatmulTile

Kind = Literal["int8", "int4", "fp8"]
FEW = 64  # rows up to which memory bounds the product: a weight is then read faster than it is multiplied
FEWEST = 16  # rows that fill the narrow side of an instruction
PROGRAMS = {"int8": 3 * 132, "int4": 13 * 132}  # at the least, of an H200's 132 multiprocessors
LEAST = 8  # steps of a part, so that a part costs more to compute than to add


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
    """The tile for ``rows`` times a weight of ``columns x depth`` codes of ``kind``; int4's steps are its groups.

    The weight is the first operand, so that few rows fill the narrow side of a tensor-core instruction and not an
    eighth of its wide one, and codes become its operand without leaving the registers. Up to 16 rows take 64 rows of
    codes and two warps, which multiply by ``mma.sync``: for 8192 x 28672 on an H200 64 us in int8 (four warps, by
    wgmma: 106) and 57 us in int4 (61 to 70). Where the weight has too few rows to fill the GPU, its columns are shared
    out too; more parts of int4 are as fast (8: 56 us), of int8 slower (3: 80 us). Up to 64 rows are not timed. Many
    rows take 128 x 128: the sum of a group of int4 codes is kept beside the whole sum, which takes as many registers
    again. int8 of 128 x 256 gives wrong results under Triton 3.6.0, and is not used.
    """
    if interpreted:
        k = group if kind == "int4" else 16 if depth <= 128 else 128
        steps = triton.cdiv(depth, k)
        return Tile(32, 16, k, warps=4, stages=1, splits=max(1, min(3, steps)))
    step = group if kind == "int4" else 128
    if rows > FEW:
        return Tile(128, 128, 64 if kind == "int8" else step, warps=8, stages=4 if kind == "fp8" else 3)
    m = max(16, triton.next_power_of_2(rows))
    few = rows <= FEWEST and kind != "fp8"
    wanted = triton.cdiv(PROGRAMS[kind] if few else 4 * 132, max(1, triton.cdiv(columns, 64)))
    splits = max(1, min(wanted, triton.cdiv(depth, step) // LEAST))
    return Tile(64, m, step, warps=2 if few else 4, stages=3 if few else 5, splits=splits)


def config_float8(rows: int, depth: int, *, interpreted: bool = INTERPRETED) -> MatmulTile | None:
    """The tile for many rows in float8 by descriptors, ``None`` for few. 256 x 128 took 1097 us at 8192**3 on an H200,
    128 x 128 1280 us, `torch._scaled_mm` 771; 128 x 256 spills."""
    if interpreted:
        return MatmulTile(32, 32, 16 if depth <= 128 else 128, warps=4, stages=1, parts=2, resident=1)
    return MatmulTile(256, 128, 128, warps=8, stages=4, parts=4, resident=1) if rows > FEW else None
