"""Losses of rows of logits and their slopes, for the kernels that read logits and those that have just written them."""

from __future__ import annotations

import triton.language as tl

from reference_kernels._common import jit, widened
from reference_kernels._powers import exponential, grouped, joined, raised


@jit
def softcapped(x: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """``softcap * tanh(x / softcap)`` in float32, without libdevice and to about two units in the last place.

    ``1 - 2 / (exp(2 * z) + 1)`` loses the digits of small ``z`` to cancellation, as most logits are: below 0.625 an odd
    polynomial, fitted to the least relative error, stays within 0.8 units.
    """
    z = x / softcap
    decay = exponential(-2.0 * tl.abs(z))
    far = tl.where(z < 0, decay - 1.0, 1.0 - decay) / (1.0 + decay)
    square = z * z
    series = -0.005704986397176981 * square + 0.02063908614218235
    series = (series * square - 0.05373971536755562) * square + 0.13331441581249237
    near = z + z * square * (series * square - 0.3333328068256378)
    return softcap * tl.where(tl.abs(z) < 0.625, near, far)


@jit
def cap_slope(x: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """The derivative of `softcapped`: ``1 - tanh**2`` in a form that keeps its digits where tanh is near 1."""
    decay = exponential(-2.0 * tl.abs(x / softcap))
    share = 1.0 / (1.0 + decay)
    return 4.0 * decay * share * share


@jit
def row_losses(
    logits_row: tl.tensor,
    target: tl.tensor,
    counts: tl.tensor,
    width: tl.tensor,
    logits_step: tl.tensor,
    smoothing: tl.tensor,
    z_loss: tl.tensor,
    softcap: tl.tensor,
    SMOOTHED: tl.constexpr,
    HAS_Z: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of ``BLOCK_ROWS`` rows the losses, the largest logits, and the logarithms of the sums of exponentials from there
    (kept apart, for their sum loses the digits of large logits); one reading of them, none of rows that do not count.
    """
    column = tl.arange(0, BLOCK_COLUMNS)[None, :].to(tl.int64)
    known = counts & (target >= 0) & (target < width)
    picked = tl.load(logits_row + target * logits_step, mask=known, other=0.0).to(tl.float32)
    if CAPPED:
        picked = softcapped(picked, softcap)
    # Logits far from zero would drown their differences in the sum: it is taken from the picked one on.
    anchor = tl.where(tl.abs(picked) < float("inf"), picked, 0.0)

    # So many logits a thread loads at once.
    group: tl.constexpr = 128 // logits_row.dtype.element_ty.primitive_bitwidth
    top = tl.full([BLOCK_ROWS, BLOCK_COLUMNS // group], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS // group], tl.float32)
    beyond = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS // group], tl.float32)
    for start in range(0, width, BLOCK_COLUMNS):
        at = start + column
        inside = counts & (at < width)
        wide = widened(tl.load(logits_row + at * logits_step, mask=inside, other=float("-inf")))
        if CAPPED:
            wide = tl.where(inside, softcapped(wide, softcap), float("-inf"))
        if SMOOTHED:
            beyond += tl.sum(grouped(tl.where(inside, wide - anchor, 0.0), group), axis=2)
        top, shrink, powers = raised(top, wide, group)
        total = total * shrink + tl.sum(powers, axis=2)
    top, shrink = joined(top)
    total = tl.sum(total * shrink, axis=1, keep_dims=True)
    log_total = tl.log(total)

    loss = (top - picked) + log_total
    if SMOOTHED:
        loss = (1.0 - smoothing) * loss + smoothing * (
            (top - anchor) + log_total - tl.sum(beyond, axis=1, keep_dims=True) / width
        )
    if HAS_Z:
        log_sum = top + log_total
        loss += z_loss * log_sum * log_sum
    return tl.where(counts, tl.where(known, loss, float("nan")), 0.0), top, log_total


@jit
def slopes(
    wide: tl.tensor,
    column: tl.tensor,
    target: tl.tensor,
    top: tl.tensor,
    log_total: tl.tensor,
    vocab: tl.tensor,
    smoothing: tl.tensor,
    z_loss: tl.tensor,
    softcap: tl.tensor,
    SMOOTHED: tl.constexpr,
    HAS_Z: tl.constexpr,
    CAPPED: tl.constexpr,
) -> tl.tensor:
    """The derivatives of the losses of `row_losses` by the logits ``wide`` of the classes ``column``."""
    capped = wide
    if CAPPED:
        capped = softcapped(wide, softcap)
    d = exponential((capped - top) - log_total)
    if HAS_Z:
        d *= 1.0 + 2.0 * z_loss * (top + log_total)
    if SMOOTHED:
        d -= smoothing / vocab
    d -= tl.where(column == target, 1.0 - smoothing, 0.0)
    if CAPPED:
        d *= cap_slope(wide, softcap)
    return d
