"""What the attention kernels share: one block of keys into a running softmax, and which block is seen by whom.

Scores are taken to base 2, which is what the hardware has an instruction for: ``log2(e)`` goes into their factor.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from reference_kernels._common import jit

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))
WIDEST = 256  # features of a head: a tile of keys and one of values have to fit into shared memory, whole heads at once


@jit
def attended(
    products: tl.tensor,
    factor: tl.tensor,
    value: tl.tensor,
    mixed: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
    ROUNDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One block of keys into the weighted mean ``mixed``, its weights' ``total`` and their largest exponent ``top``.

    ``products`` of queries and keys are ``-inf`` where a key is not seen, ``factor`` is positive. Weights are
    ``ROUNDED`` to that dtype for the second product, their total is not.
    """
    new_top = tl.maximum(top, tl.max(products, axis=1) * factor)
    # As long as a query has seen no key, -inf - -inf would poison it.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(products * factor - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(weight, axis=1)
    mixed = tl.dot(weight.to(ROUNDED).to(value.dtype), value, mixed * fade[:, None], input_precision="ieee")
    return mixed, total, new_top


@jit
def finished(mixed: tl.tensor, total: tl.tensor, top: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The mean, 0 for a query that saw no key, and the base-2 logarithm of the sum of exponentials, ``-inf`` for it."""
    empty = total == 0.0
    mixed = mixed / tl.where(empty, 1.0, total)[:, None]
    return mixed, tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))


@jit
def span(
    first: tl.tensor,
    shift: tl.tensor,
    others: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Which of ``others`` positions the ``OWN`` positions from ``first`` on see: ``begin, whole, broken, end``.

    Position ``i`` meets ``i + shift - before`` to ``i + shift + after``. All ``OWN`` meet all of ``[whole, broken)``,
    a multiple of ``OTHER`` long; ``[begin, whole)`` and ``[broken, end)`` ask for a mask. ``begin`` and ``whole`` are
    multiples of ``OTHER``.
    """
    begin = first * 0
    whole = first * 0
    end = others + begin
    broken = others + begin
    # Clamped before each division, which rounds towards zero on a GPU.
    if HAS_BEFORE:
        begin = tl.maximum(first + shift - before, 0) // OTHER * OTHER
        whole = (tl.maximum(first + OWN - 1 + shift - before, 0) + OTHER - 1) // OTHER * OTHER
    if HAS_AFTER:
        end = tl.maximum(tl.minimum(first + OWN + shift + after, others), 0)
        broken = tl.minimum(first + 1 + shift + after, others)
    broken = tl.maximum(broken, 0) // OTHER * OTHER
    whole = tl.minimum(whole, (end + OTHER - 1) // OTHER * OTHER)
    return begin, whole, tl.maximum(broken, whole), end


@jit
def sequence_at(
    block: tl.tensor,
    offsets_ptr: tl.tensor,
    sequences: tl.tensor,
    BLOCK: tl.constexpr,
    SEARCH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The packed sequence that ``block`` belongs to, and the number of ``block`` in it.

    Sequence ``i`` owns the blocks from ``offsets[i] // BLOCK + i`` on, of which the last may be one too many: so a
    launch of ``total // BLOCK + sequences`` programs covers sequences of any lengths, which are not read beforehand.
    """
    found = block * 0
    for first in range(0, sequences, SEARCH):
        at = first + tl.arange(0, SEARCH)
        begin = tl.load(offsets_ptr + at, mask=at < sequences, other=0).to(tl.int32)
        found += tl.sum(((begin // BLOCK + at <= block) & (at < sequences)).to(tl.int32), axis=0)
    sequence = tl.maximum(found - 1, 0)
    # Not below 0 for offsets that were not checked.
    return sequence, tl.maximum(block - tl.load(offsets_ptr + sequence).to(tl.int32) // BLOCK - sequence, 0)


@jit
def bounds_of(offsets_ptr: tl.tensor, sequence: tl.tensor, total: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """First row and number of rows of a packed sequence, within the tensor whatever ``offsets`` say."""
    begin = tl.load(offsets_ptr + sequence).to(tl.int32)
    end = tl.load(offsets_ptr + sequence + 1).to(tl.int32)
    begin = tl.minimum(tl.maximum(begin, 0), total)
    return begin, tl.minimum(tl.maximum(end, begin), total) - begin


@jit
def extents(
    block: tl.tensor,
    own_ptr: tl.tensor,
    other_ptr: tl.tensor,
    sequences: tl.tensor,
    own: tl.tensor,
    other: tl.tensor,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The number of ``block`` in its sequence; first row and rows of that among its own, and among the others."""
    start = block * 0
    other_start = start
    count = own + start
    other_count = other + start
    if PACKED:
        sequence, block = sequence_at(block, own_ptr, sequences, BLOCK, 128)
        start, count = bounds_of(own_ptr, sequence, own)
        other_start, other_count = bounds_of(other_ptr, sequence, other)
    return block, start, count, other_start, other_count


@jit
def seen(
    position: tl.tensor,
    other: tl.tensor,
    others: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
) -> tl.tensor:
    """Which of ``other`` positions, across, each ``position``, down, meets: those from ``before`` to ``after`` it."""
    inside = (other < others)[None, :]
    if HAS_BEFORE:
        inside = inside & (other[None, :] >= (position - before)[:, None])
    if HAS_AFTER:
        inside = inside & (other[None, :] <= (position + after)[:, None])
    return inside


@jit
def tile_at(
    base: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    row_step: tl.tensor,
    column: tl.tensor,
    columns: tl.tensor,
    column_step: tl.tensor,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """A tile of the rows below ``rows``, of columns below ``columns`` unless it is as ``WHOLE``; 0 elsewhere."""
    at = base + row.to(tl.int64)[:, None] * row_step + (column * column_step)[None, :]
    inside = (row < rows)[:, None]
    if not WHOLE:
        inside = inside & (column < columns)[None, :]
    return tl.load(at, mask=inside, other=0.0)


def padded(features: int) -> int:
    """Columns of a tile that holds a head: a power of two, at least the 16 that ``tl.dot`` takes."""
    return max(16, int(triton.next_power_of_2(features)))


def scale_of(kernel: str, scale: float | None, features: int) -> float:
    """``scale``, by default ``features ** -0.5``; raises `ValueError` unless it is positive and finite."""
    scale = features**-0.5 if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"{kernel}: scale is {scale}, allowed: above 0 and finite; negate q instead of the scale")
    return scale


def check_features(kernel: str, features: int) -> None:
    """Raise `ValueError` for a head of a size that has no tile."""
    if not 1 <= features <= WIDEST:
        raise ValueError(f"{kernel}: a head has {features} features, supported: 1 to {WIDEST}")


def check_groups(kernel: str, heads: int, kv_heads: int) -> None:
    """Raise `ValueError` unless every head of keys and values serves equally many of the queries' heads."""
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"{kernel}: q has {heads} heads, k and v have {kv_heads}; the first must be a multiple of the second, "
            "since each head of k and v serves as many heads of q"
        )


def check_window(kernel: str, window: int | None) -> None:
    """Raise `ValueError` for a window that holds no key."""
    if window is not None and window < 1:
        raise ValueError(f"{kernel}: window is {window}, allowed: None, or 1 (a query's own position) and more")


def readable(kernel: str, what: str, tensor: torch.Tensor) -> None:
    """Raise `RuntimeError` where ``tensor`` cannot be read back, because a CUDA graph is being captured."""
    if tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{kernel}: {what} are checked, which waits for the device and cannot be captured in a CUDA graph; "
            "check them yourself and pass checked=False"
        )
