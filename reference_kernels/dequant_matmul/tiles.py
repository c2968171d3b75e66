"""The tuned numbers of dequant_matmul: tiles, and into how many parts the sum over k is split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import triton

from reference_kernels._common import INTERPRETED

Kind = Literal["int8", "int4", "fp8"]
FEW = 64  # rows up to which memory bounds the product: a weight is then read faster than it is multiplied
PROGRAMS = 4 * 132  # four on each multiprocessor of an H200
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

    The weight is the first operand, so that few rows fill the narrow side of a tensor-core instruction (64 x 16) and
    not an eighth of its wide one, and codes become its operand without leaving the registers. For few rows, four
    programs and four stages under way keep 64 KiB of int4 codes, 128 KiB of others, in flight on each multiprocessor,
    where 36 are enough for 4.8 TB/s; where the weight has too few rows for that, its columns are shared out too. int4
    takes 128 rows at once: a warp then executes 4.6 instructions for 32 codes (64 rows: 5.7, counted in the loop for
    sm_90), which for 8192 x 28672 fills 38 us of an H200's issue slots at 1.7 GHz, where memory asks for 29. Many rows
    take 128 x 128: the sum of a group of int4 codes, and of 128 float8 products, is kept beside the whole sum, which
    takes as many registers again.
    """
    if interpreted:
        k = group if kind == "int4" else 16 if depth <= 128 else 128
        steps = triton.cdiv(depth, k)
        return Tile(32, 16, k, warps=4, stages=1, splits=max(1, min(3, steps)))
    step = group if kind == "int4" else 128
    if rows > FEW:
        return Tile(128, 128, 64 if kind == "int8" else step, warps=8, stages=4 if kind == "fp8" else 3)
    m = max(16, triton.next_power_of_2(rows))
    n = 128 if rows <= 16 and kind == "int4" else 64
    steps = triton.cdiv(depth, step)
    wanted = triton.cdiv(PROGRAMS, max(1, triton.cdiv(columns, n)))
    return Tile(n, m, step, warps=4, stages=5 if n == 64 else 4, splits=max(1, min(wanted, steps // LEAST)))
