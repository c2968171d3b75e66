"""Fused cross-entropy: one read of the logits forward, one read and one write backward, nothing of their size saved."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl

from reference_kernels._common import (
    FLOATS,
    INTERPRETED,
    Rows,
    RowTile,
    check_tensor,
    jit,
    placed,
    row_offset,
    row_tile,
    widened,
)
from reference_kernels._elementwise import tile_of
from reference_kernels.cross_entropy.rows import row_losses, slopes

Reduction = Literal["none", "mean", "sum"]

TOTAL_BLOCK, TOTAL_WARPS = 4096, 16  # losses that the one program of a mean or sum adds up at a time


def config(width: int, *, interpreted: bool = INTERPRETED) -> RowTile:
    """Forward tile for rows of ``width`` logits: steps of 2048, 16 logits for each thread of 4 warps.

    Threads meet only when a row ends, so that a program need not be large: sixteen of them run at a time.
    """
    return row_tile(width, whole=2048, step=2048, interpreted=interpreted)


def config_backward(width: int, dtype: torch.dtype) -> RowTile:
    """Backward tile for rows of ``width`` logits of ``dtype``; a row wider than the tile takes several programs, for
    no element needs another once the row's statistics are known."""
    return tile_of(width, dtype, loads=4)


@jit
def _losses_kernel(
    losses_ptr: tl.tensor,
    statistics_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    target_ptr: tl.tensor,
    ignore_index: tl.tensor,
    smoothing: tl.tensor,
    z_loss: tl.tensor,
    softcap: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    logits_stride0: tl.tensor,
    logits_stride1: tl.tensor,
    logits_stride2: tl.tensor,
    logits_step: tl.tensor,
    target_stride0: tl.tensor,
    target_stride1: tl.tensor,
    target_stride2: tl.tensor,
    SMOOTHED: tl.constexpr,
    HAS_Z: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """The losses of ``BLOCK_ROWS`` rows and, for backward, ``statistics`` of ``(2, rows)``: the largest logit, and the
    logarithm of the sum of exponentials from there. ``+inf`` for the latter, which no sum gives, marks an ignored row.
    """
    lane = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    target_at = row_offset(lane, size1, size2, target_stride0, target_stride1, target_stride2)
    target = tl.load(target_ptr + target_at, mask=lane < rows, other=ignore_index)[:, None]
    row = lane[:, None]
    row_inside = row < rows
    logits_row = logits_ptr + row_offset(row, size1, size2, logits_stride0, logits_stride1, logits_stride2)
    counts = row_inside & (target != ignore_index)
    loss, top, log_total = row_losses(
        logits_row,
        target,
        counts,
        width,
        logits_step,
        smoothing,
        z_loss,
        softcap,
        SMOOTHED,
        HAS_Z,
        CAPPED,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
    )
    tl.store(losses_ptr + row, loss, mask=row_inside)
    tl.store(statistics_ptr + row, tl.where(counts, top, 0.0), mask=row_inside)
    tl.store(statistics_ptr + rows + row, tl.where(counts, log_total, float("inf")), mask=row_inside)


@jit
def _total_kernel(
    loss_ptr: tl.tensor,
    count_ptr: tl.tensor,
    losses_ptr: tl.tensor,
    statistics_ptr: tl.tensor,
    rows: tl.tensor,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: the sum or mean of ``rows`` losses, and how many of them count, always in the same order."""
    lane = tl.arange(0, BLOCK).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        at = start + lane
        inside = at < rows
        total += tl.load(losses_ptr + at, mask=inside, other=0.0)
        mark = tl.load(statistics_ptr + rows + at, mask=inside, other=float("inf"))
        count += (mark != float("inf")).to(tl.int32)
    counted = tl.sum(count, axis=0).to(tl.float32)
    loss = tl.sum(total, axis=0)
    if MEAN:
        loss = loss / counted
    tl.store(loss_ptr, loss)
    tl.store(count_ptr, counted)


@jit
def _gradient_kernel(
    dlogits_ptr: tl.tensor,
    statistics_ptr: tl.tensor,
    count_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    target_ptr: tl.tensor,
    dloss_ptr: tl.tensor,
    ignore_index: tl.tensor,
    smoothing: tl.tensor,
    z_loss: tl.tensor,
    softcap: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    first: tl.tensor,
    vocab: tl.tensor,
    column_blocks: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    logits_stride0: tl.tensor,
    logits_stride1: tl.tensor,
    logits_stride2: tl.tensor,
    logits_step: tl.tensor,
    target_stride0: tl.tensor,
    target_stride1: tl.tensor,
    target_stride2: tl.tensor,
    dloss_stride0: tl.tensor,
    dloss_stride1: tl.tensor,
    dloss_stride2: tl.tensor,
    SMOOTHED: tl.constexpr,
    HAS_Z: tl.constexpr,
    CAPPED: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One tile of the gradient, contiguous ``(rows, width)``, which may overwrite the logits: ``width`` classes of
    ``vocab``, from ``first`` on. Logits of ignored rows are not read."""
    program = tl.program_id(0).to(tl.int64)
    # What there is once a row is a column only after it is loaded: else each thread loads it for each of its neighbours
    # in the row, 8 times in bfloat16.
    lane = program // column_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    target_at = row_offset(lane, size1, size2, target_stride0, target_stride1, target_stride2)
    target = tl.load(target_ptr + target_at, mask=lane < rows, other=ignore_index)
    counts = (lane < rows) & (target != ignore_index)
    top = tl.load(statistics_ptr + lane, mask=counts, other=0.0)[:, None]
    log_total = tl.load(statistics_ptr + rows + lane, mask=counts, other=0.0)[:, None]
    dloss_at = row_offset(lane, size1, size2, dloss_stride0, dloss_stride1, dloss_stride2)
    dloss = tl.load(dloss_ptr + dloss_at, mask=counts, other=0.0)
    if MEAN:
        dloss = dloss / tl.load(count_ptr)
    dloss = tl.where((target >= 0) & (target < vocab), dloss, float("nan"))
    dloss = tl.where(counts, dloss, 0.0)[:, None]  # times slopes that are finite where nothing was read
    counts = counts[:, None]

    row = lane[:, None]
    start = program % column_blocks * BLOCK_COLUMNS
    within = tl.arange(0, BLOCK_COLUMNS)[None, :]
    column = start + within
    # Where in this block the label is, in 32 bits: a comparison in 64 takes six instructions an element.
    target = target[:, None] - (first + start)
    target = tl.where((target >= 0) & (target < BLOCK_COLUMNS), target, -1).to(tl.int32)
    inside = (row < rows) & (column < width)
    logits_at = row_offset(row, size1, size2, logits_stride0, logits_stride1, logits_stride2) + column * logits_step
    wide = widened(tl.load(logits_ptr + logits_at, mask=inside & counts, other=0.0))
    d = slopes(
        wide,
        within,
        target,
        top,
        log_total,
        vocab,
        smoothing,
        z_loss,
        softcap,
        SMOOTHED,
        HAS_Z,
        CAPPED,
    )
    tl.store(dlogits_ptr + row * width + column, d * dloss, mask=inside)


def _losses(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, smoothing: float, z_loss: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    losses = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    statistics = torch.empty((2, target.numel()), dtype=torch.float32, device=logits.device)
    if target.numel():
        rows = Rows.of(logits, target.unsqueeze(-1))
        tile = config(rows.width)
        with placed(logits.device):
            _losses_kernel[(triton.cdiv(rows.count, tile.rows),)](
                losses,
                statistics,
                *rows.tensors,
                ignore_index,
                smoothing,
                z_loss,
                softcap,
                rows.count,
                rows.width,
                *rows.sizes[1:],
                *rows.strides[0],
                *rows.strides[1][:3],
                SMOOTHED=smoothing != 0,
                HAS_Z=z_loss != 0,
                CAPPED=softcap != 0,
                BLOCK_ROWS=tile.rows,
                BLOCK_COLUMNS=tile.columns,
                num_warps=tile.warps,
            )
    return losses, statistics


def _total(losses: torch.Tensor, statistics: torch.Tensor, mean: bool) -> tuple[torch.Tensor, torch.Tensor]:
    loss, count = (torch.empty((), dtype=torch.float32, device=losses.device) for _ in range(2))
    with placed(losses.device):
        _total_kernel[(1,)](
            loss,
            count,
            losses,
            statistics,
            losses.numel(),
            MEAN=mean,
            BLOCK=TOTAL_BLOCK,
            num_warps=TOTAL_WARPS,
        )
    return loss, count


# The custom operators write "no softcap" as 0.0: their schemas then have no optional numbers.
@torch.library.custom_op("reference_kernels::cross_entropy", mutates_args=())
def _cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, the rows' statistics, and how many rows count (empty for "none", which does not need it)."""
    losses, statistics = _losses(logits, target, ignore_index, smoothing, z_loss, softcap)
    if reduction == "none":
        return losses, statistics, losses.new_empty(0)
    loss, count = _total(losses, statistics, reduction == "mean")
    return loss, statistics, count


@_cross_entropy.register_fake
def _(logits: torch.Tensor, target: torch.Tensor, *options: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    every = options[-1] == "none"
    loss, statistics, count = (
        torch.empty(shape, dtype=torch.float32, device=logits.device)
        for shape in (target.shape if every else (), (2, target.numel()), (0,) if every else ())
    )
    return loss, statistics, count


def write_gradient(
    dlogits: torch.Tensor,
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistics: torch.Tensor,
    count: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    mean: bool,
    first: int = 0,
    vocab: int | None = None,
) -> None:
    """Write the gradient by ``logits`` into the contiguous ``dlogits``, which may be ``logits``; they are those of the
    classes from ``first`` on, of ``vocab`` where that is not all there are."""
    if dlogits.numel() == 0:
        return
    rows = Rows.of(logits, target.unsqueeze(-1), dloss.expand(target.shape).unsqueeze(-1))
    tile = config_backward(rows.width, logits.dtype)
    blocks = triton.cdiv(rows.width, tile.columns)
    with placed(logits.device):
        _gradient_kernel[(triton.cdiv(rows.count, tile.rows) * blocks,)](
            dlogits,
            statistics,
            count,
            *rows.tensors,
            ignore_index,
            smoothing,
            z_loss,
            softcap,
            rows.count,
            rows.width,
            first,
            rows.width if vocab is None else vocab,
            blocks,
            *rows.sizes[1:],
            *rows.strides[0],
            *rows.strides[1][:3],
            *rows.strides[2][:3],
            SMOOTHED=smoothing != 0,
            HAS_Z=z_loss != 0,
            CAPPED=softcap != 0,
            MEAN=mean,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )


@torch.library.custom_op("reference_kernels::cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistics: torch.Tensor,
    count: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
) -> torch.Tensor:
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    options = ignore_index, smoothing, z_loss, softcap
    write_gradient(dlogits, dloss, logits, target, statistics, count, *options, reduction == "mean")
    return dlogits


@_cross_entropy_backward.register_fake
def _(_: torch.Tensor, logits: torch.Tensor, *__: object) -> torch.Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    logits, target, *ctx.options = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else torch fills zeros for the statistics and the count, a launch each
    ctx.save_for_backward(logits, target, *output[1:])


def _differentiate(ctx: Any, dloss: torch.Tensor | None, *_: object) -> tuple[Any, ...]:
    if dloss is None:
        return (None,) * 7
    return _cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.options), *[None] * 6


_cross_entropy.register_autograd(_differentiate, setup_context=_save)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
) -> torch.Tensor:
    """Cross-entropy of ``logits`` ``(*batch, vocab)`` and int64 labels ``target`` ``(*batch)``, in float32.

    Of every row, ``(*batch)``, for ``reduction="none"``; else their sum or mean, 0-d. Logits are float32, float16 or
    bfloat16; both may have any strides. What the options do, and what becomes of rows that are ignored or whose label
    is out of range, says `cross_entropy_reference`. Differentiable once by ``logits``: one launch, rounded once to
    their dtype.

    Raises `TypeError` for other dtypes; `ValueError` for shapes that do not fit, options out of range, an unknown
    reduction, or mixed devices.
    """
    check_options("cross_entropy", label_smoothing, z_loss, softcap, reduction)
    check_tensor("cross_entropy", "logits", logits, logits, FLOATS)
    check_tensor("cross_entropy", "target", target, logits, (torch.int64,))
    if logits.ndim == 0 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy: logits have shape {tuple(logits.shape)}, target {tuple(target.shape)}; they are "
            "(*batch, vocab) and (*batch), so move the classes of (batch, classes, ...) to the end"
        )
    loss: torch.Tensor = _cross_entropy(
        logits, target, ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0), reduction
    )[0]
    return loss


def check_options(kernel: str, label_smoothing: float, z_loss: float, softcap: float | None, reduction: str) -> None:
    """Raise `ValueError` for an unknown reduction or an option out of range."""
    if reduction not in get_args(Reduction):
        raise ValueError(f"{kernel}: reduction is {reduction!r}, known: {', '.join(get_args(Reduction))}")
    for name, value, allowed, fits in (
        ("label_smoothing", label_smoothing, "0 to 1", 0 <= label_smoothing <= 1),
        ("z_loss", z_loss, "0 or more, finite", 0 <= z_loss < float("inf")),
        ("softcap", softcap, "None, or above 0 and finite", softcap is None or 0 < softcap < float("inf")),
    ):
        if not fits:
            raise ValueError(f"{kernel}: {name} is {value}, allowed: {allowed}")
