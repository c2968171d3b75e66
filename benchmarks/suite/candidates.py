"""Other tiles for each kernel: what its ``config`` might have returned, pruned to what an sm_90 multiprocessor holds.

Made from the tile in use by changing its fields, so that no kernel needs to know of it; `VARIED` says by the tile's
class how. Numbers are of an H200: 227 KiB of shared memory a block, 64K registers, 132 multiprocessors.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

SHARED = 227 * 1024
PROCESSORS = 132
# Float32 accumulators a thread: with 256 of 255 registers nothing is left.
_ACCUMULATORS = 192
_MOST_WHOLE = 65536


def others(current: Any, arguments: Sequence[Any], columns: int | None = None) -> list[Any]:
    """Tiles of the kind of ``current``, which ``config(*arguments)`` returned; the current one is not among them.

    ``columns`` is the width of a row, where the arguments do not begin with it. Raises `TypeError` for a kind of tile
    that is not known here.
    """
    if isinstance(current, int):
        return [warps for warps in (1, 2, 4, 8, 16) if warps != current]
    if isinstance(current, tuple):
        return _pairs(current, arguments, columns)
    kind = type(current).__name__
    if kind not in VARIED:
        raise TypeError(f"candidates: {kind} is no tile that is known; add it to VARIED")
    wide = columns if columns is not None else next((each for each in arguments if isinstance(each, int)), 0)
    return _without(VARIED[kind](current, wide), current)


def _without(found: Iterator[Any], current: Any) -> list[Any]:
    return [each for each in dict.fromkeys(found) if each != current]


def _pairs(current: tuple[Any, ...], arguments: Sequence[Any], columns: int | None) -> list[Any]:
    """A tile and how many programs, or rows for each program: both vary, the number by powers of two."""
    tile, number = current
    step = getattr(tile, "rows", 1)
    tiles = [tile, *others(tile, arguments, columns)]
    numbers = (number, number // 2, 2 * number, 4 * number)
    made = [(each, max(1, count)) for each in tiles for count in (numbers if each == tile else numbers[:1])]
    # Rows for each program come in whole tiles, where they do in the current pair.
    if number % step == 0:
        made = [(each, -(-count // each.rows) * each.rows) for each, count in made]
    return [each for each in dict.fromkeys(made) if each != current]


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def row_tiles(current: Any, width: int) -> Iterator[Any]:
    """Whole rows at 4 to 64 elements a thread, and loops in steps of 1024 to 16384 at 4 to 32."""
    whole = _power(width)
    if not getattr(current, "loop", False) and current.columns < width:
        yield from blocks(current, width)
        return
    for rows, warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32)):
        each = rows * whole // (32 * warps)
        if whole <= _MOST_WHOLE and 4 <= each <= 64 and (rows == 1 or rows * whole <= 8192):
            yield dataclasses.replace(current, rows=rows, columns=max(16, whole), warps=warps, loop=False)
    for columns, warps in itertools.product((1024, 2048, 4096, 8192, 16384), (4, 8, 16, 32)):
        if columns < width and 4 <= columns // (32 * warps) <= 32:
            yield dataclasses.replace(current, rows=1, columns=columns, warps=warps, loop=True)


def blocks(current: Any, _: int) -> Iterator[Any]:
    """Tiles of kernels without a reduction: 8 to 64 elements a thread, so many rows as now, half or twice."""
    for rows in {max(1, current.rows // 2), current.rows, 2 * current.rows} if current.rows > 1 else {1}:
        for columns, warps in itertools.product((256, 512, 1024, 2048, 4096, 8192), (4, 8)):
            if 8 <= rows * columns // (32 * warps) <= 64:
                yield dataclasses.replace(current, rows=rows, columns=columns, warps=warps)


def gate_tiles(current: Any, _: int) -> Iterator[Any]:
    """Rows that are whole whatever the tile: more or fewer of them, and warps."""
    for rows, warps in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8)):
        if 4 <= rows * current.columns // (32 * warps) <= 32:
            yield dataclasses.replace(current, rows=rows, warps=warps)


def column_tiles(current: tuple[Any, int]) -> Iterator[Any]:
    """Sums over rows: a tile, and the parts that the rows are cut into, each with a row of partial sums."""
    tile, parts = current
    for rows, columns, warps in itertools.product((8, 16, 32, 64), (64, 128, 256, 512), (4, 8)):
        if 8 <= rows * columns // (32 * warps) <= 64:
            # As many programs as now, whatever the columns of each.
            for factor in (1, 2):
                yield (
                    dataclasses.replace(tile, rows=rows, columns=columns, warps=warps),
                    max(1, factor * parts * columns // tile.columns),
                )


def rope_tiles(current: Any, _: int) -> Iterator[Any]:
    for tokens, warps in itertools.product((1, 2, 4, 8), (2, 4, 8)):
        yield dataclasses.replace(current, tokens=tokens, warps=warps)
    if current.q_heads > 1 and current.k_heads > 1:
        for tokens, warps in itertools.product((1, 2, 4), (2, 4)):
            yield dataclasses.replace(
                current,
                tokens=tokens,
                q_heads=current.q_heads // 2,
                k_heads=current.k_heads // 2,
                blocks=2 * current.blocks,
                warps=warps,
            )


def matmul_tiles(current: Any, rows: int) -> Iterator[Any]:
    """bfloat16 operands; ``rows`` of the result decide between tiles for wgmma and narrow ones that stream a weight."""
    if rows <= 64:
        choices = itertools.product((current.m,), (16, 32, 64), (64, 128, 256), (4, 8), (3, 4, 5), (8,))
    else:
        choices = itertools.product((64, 128, 256), (64, 128, 256), (32, 64, 128), (4, 8), (3, 4, 5), (4, 8, 16))
    for m, n, k, warps, stages, group in choices:
        held = m * n // (32 * warps)
        shared = (m + n) * k * 2 * stages
        if shared > SHARED or held > _ACCUMULATORS or (rows > 64 and held < 64):
            continue
        if rows > 64 and (group != current.group and (m, n, k) != (current.m, current.n, current.k)):
            continue  # the order of tiles is tried for the tile in use alone
        made = dataclasses.replace(current, m=m, n=n, k=k, warps=warps, stages=stages, group=group)
        if current.resident:
            made = dataclasses.replace(made, resident=2 if warps == 4 and 2 * shared <= SHARED else 1)
        yield made
    if current.resident:
        yield from (dataclasses.replace(current, parts=parts) for parts in (1, 2, 4))


def attention_tiles(current: Any, features: int) -> Iterator[Any]:
    """At most 64 queries for each group of four warps, as wgmma has it."""
    wide = max(16, _power(features))
    for queries, keys, warps, stages in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4)):
        shared = 2 * wide * (queries + 2 * keys * stages)
        held = max(queries, keys) * wide // (32 * warps)
        if shared <= SHARED and held <= _ACCUMULATORS:
            yield dataclasses.replace(current, queries=queries, keys=keys, warps=warps, stages=stages)


def decode_tiles(current: Any, _: int) -> Iterator[Any]:
    for keys, chunk, warps, stages in itertools.product(
        (32, 64, 128), (256, 512, 1024, 2048, 4096), (2, 4, 8), (2, 3, 4, 5)
    ):
        # 128 features of keys and of values, in bfloat16.
        if keys * 128 * 2 * 2 * stages <= SHARED and (stages == current.stages or chunk == current.chunk):
            yield dataclasses.replace(current, keys=keys, chunk=chunk, warps=warps, stages=stages)


def dequant_tiles(current: Any, arguments: Sequence[Any]) -> list[Any]:
    """Rows of the weight, steps of as many products or twice as many, stages, and parts of the sum."""
    return _without(_dequant_tiles(current, arguments[3]), current)


def _dequant_tiles(current: Any, kind: str) -> Iterator[Any]:
    steps = (current.k,) if kind == "int4" else (current.k, 2 * current.k)  # int4: a group
    for n, k, warps, stages in itertools.product((32, 64, 128, 256), steps, (2, 4, 8), (2, 3, 4, 5, 6)):
        for m in {current.m} if current.m < 128 else {64, 128}:
            held = n * m // (32 * warps)
            if held <= _ACCUMULATORS // 2 and (n + 2 * m) * k * stages <= SHARED and (k == current.k or n == current.n):
                yield dataclasses.replace(current, n=n, m=m, k=k, warps=warps, stages=stages)
    for splits in (1, 2, 3, 4, 6, 8):
        yield dataclasses.replace(current, splits=splits)


def bag_tiles(current: Any) -> Iterator[Any]:
    for samples, warps in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4)):
        if 4 <= samples * current.columns // (32 * warps) <= 64:
            yield dataclasses.replace(current, samples=samples, warps=warps)


def chunk_tiles(current: Any) -> Iterator[Any]:
    """Elements at a time and warps; how many a program takes is in the table of tensors, and stays."""
    for block, warps in itertools.product((512, 1024, 2048, 4096), (4, 8)):
        if block <= current.elements and 4 <= block // (32 * warps) <= 32:
            yield dataclasses.replace(current, block=block, warps=warps)


def logit_chunks(current: Any) -> Iterator[Any]:
    for rows in (512, 1024, 2048, 4096, 8192):
        yield dataclasses.replace(current, rows=rows)


def search_tiles(current: Any, _: int) -> Iterator[Any]:
    for block, search, warps in itertools.product((2048, 4096, 8192, 16384), (512, 1024, 2048), (8, 16, 32)):
        if 4 <= block // (32 * warps) <= 32:
            yield dataclasses.replace(current, block=block, search=search, warps=warps)


VARIED: dict[str, Callable[[Any, int], Iterator[Any]]] = {
    "RowTile": row_tiles,
    "RopeTile": rope_tiles,
    "MatmulTile": matmul_tiles,
    "AttentionTile": attention_tiles,
    "DecodeTile": decode_tiles,
    "Tile": search_tiles,
}
