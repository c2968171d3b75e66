"""Fused linear layer and cross-entropy: logits by chunks in one buffer, where they are turned into their gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl

from reference_kernels._common import check_tensor, jit, placed, widened
from reference_kernels.cross_entropy.kernel import Reduction, _losses, _total, check_options, write_gradient
from reference_kernels.cross_entropy.kernel import config as config_rows
from reference_kernels.cross_entropy.rows import row_losses, slopes
from reference_kernels.linear.products import check_operands
from reference_kernels.linear_cross_entropy.chunks import config
from reference_kernels.linear_cross_entropy.cublas import add_columns, float32_sums, multiply, write_logits

Gradients = Literal["forward", "backward"]
Options = tuple[int, float, float, float]  # ignore_index, label smoothing, z-loss, softcap
Wanted = Sequence[bool]  # by x, weight, bias

SCALE_BLOCK, SCALE_WARPS = 4096, 4
SCALE_PROGRAMS = 1056  # 8 on each multiprocessor of an H200: a scale of 1 costs no more than their launch


@jit
def _loss_gradient_kernel(
    losses_ptr: tl.tensor,
    statistics_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    target_ptr: tl.tensor,
    count_ptr: tl.tensor,
    ignore_index: tl.tensor,
    smoothing: tl.tensor,
    z_loss: tl.tensor,
    softcap: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    statistics_stride: tl.tensor,
    SMOOTHED: tl.constexpr,
    HAS_Z: tl.constexpr,
    CAPPED: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """The losses and statistics of ``BLOCK_ROWS`` rows as `cross_entropy` has them, and over their logits, contiguous
    ``(rows, width)``, the gradient of their sum or mean. The second reading of the logits finds them in L2."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_inside = row < rows
    target = tl.load(target_ptr + row, mask=row_inside, other=ignore_index)
    counts = row_inside & (target != ignore_index)
    logits_row = logits_ptr + row * width
    loss, top, log_total = row_losses(
        logits_row,
        target,
        counts,
        width,
        1,
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
    top = tl.where(counts, top, 0.0)
    tl.store(statistics_ptr + row, top, mask=row_inside)
    tl.store(statistics_ptr + statistics_stride + row, tl.where(counts, log_total, float("inf")), mask=row_inside)
    log_total = tl.where(counts, log_total, 0.0)

    share = tl.where((target >= 0) & (target < width), 1.0, float("nan"))
    if MEAN:
        share = share / tl.load(count_ptr)
    share = tl.where(counts, share, 0.0)  # times slopes that are finite where nothing was read
    within = tl.arange(0, BLOCK_COLUMNS)[None, :]
    # Every thread has to have read what it wants of the row, the picked logit too, before any overwrites it.
    tl.debug_barrier()
    for start in range(0, width, BLOCK_COLUMNS):
        at = start + within
        inside = row_inside & (at < width)
        wide = widened(tl.load(logits_row + at, mask=inside & counts, other=0.0))
        # Where in this block the label is, in 32 bits: a comparison in 64 takes six instructions an element.
        here = target - start
        here = tl.where((here >= 0) & (here < BLOCK_COLUMNS), here, -1).to(tl.int32)
        d = slopes(wide, within, here, top, log_total, width, smoothing, z_loss, softcap, SMOOTHED, HAS_Z, CAPPED)
        tl.store(logits_row + at, d * share, mask=inside)


@jit
def _scale_kernel(
    values_ptr: tl.tensor, scale_ptr: tl.tensor, numel: tl.tensor, programs: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """``values`` times ``scale``, in place; nothing is read or written where that is 1."""
    scale = tl.load(scale_ptr)
    lane = tl.arange(0, BLOCK).to(tl.int64)
    end = tl.where(scale == 1.0, 0, numel)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, end, tl.cast(programs, tl.int64) * BLOCK):
        inside = start + lane < numel
        values = tl.load(values_ptr + start + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(values_ptr + start + lane, values * scale, mask=inside)


def _loss_gradient(
    losses: torch.Tensor,
    statistics: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    count: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    mean: bool,
) -> None:
    """Write the losses ``(rows,)`` and statistics ``(2, rows)`` of the contiguous ``logits``, and over those their
    gradient."""
    if target.numel() == 0:
        return
    tile = config_rows(logits.shape[1])
    with placed(logits.device):
        _loss_gradient_kernel[(triton.cdiv(len(logits), tile.rows),)](
            losses,
            statistics,
            logits,
            target,
            count,
            ignore_index,
            smoothing,
            z_loss,
            softcap,
            *logits.shape,
            statistics.stride(0),
            SMOOTHED=smoothing != 0,
            HAS_Z=z_loss != 0,
            CAPPED=softcap != 0,
            MEAN=mean,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )


def _scale(values: torch.Tensor, scale: torch.Tensor) -> None:
    if values.numel():
        programs = min(SCALE_PROGRAMS, triton.cdiv(values.numel(), SCALE_BLOCK))
        with placed(values.device):
            _scale_kernel[(programs,)](
                values, scale, values.numel(), programs, BLOCK=SCALE_BLOCK, num_warps=SCALE_WARPS
            )


def _rows(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` as ``(rows, hidden)`` and its labels as contiguous ``(rows,)``."""
    count = math.prod(target.shape)  # which reshape(-1, ...) cannot tell where there are no columns
    return x.reshape(count, x.shape[-1]), target.reshape(count).contiguous()


def _gradients(
    x: torch.Tensor, weight: torch.Tensor, wanted: Wanted, *, wide: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for the gradients by ``x``, weight and bias; empty where not ``wanted``. ``wide``: the first and last in
    float32, which are added up over chunks of classes or multiplied by what backward knows."""
    kept = torch.float32 if wide else x.dtype
    shapes = (x.shape, kept), (weight.shape, x.dtype), (weight.shape[:1], kept)
    dx, dweight, dbias = (
        torch.empty(shape if needed else (0,), dtype=dtype, device=x.device)
        for (shape, dtype), needed in zip(shapes, wanted, strict=True)
    )
    return dx, dweight, dbias


@float32_sums()
def _early(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    options: Options,
    mean: bool,
    chunk_rows: int | None,
    wanted: Wanted,
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The losses of the rows, their statistics, and the gradients of the sum or mean, by chunks of rows."""
    rows, labels = _rows(x, target)
    found = dx, dweight, dbias = _gradients(x, weight, wanted, wide=True)
    losses = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    statistics = torch.empty((2, len(rows)), dtype=torch.float32, device=x.device)
    count = (labels != options[0]).sum().to(torch.float32)
    step = config(len(rows), len(weight), x.dtype, chunk_rows).rows
    buffer = torch.empty((min(step, len(rows)), len(weight)), dtype=x.dtype, device=x.device)
    for begin in range(0, max(len(rows), 1), step):
        part = slice(begin, min(begin + step, len(rows)))
        logits = buffer[: part.stop - begin]
        write_logits(logits, rows[part], weight, bias)
        _loss_gradient(losses[part], statistics[:, part], logits, labels[part], count, *options, mean)
        if wanted[0]:
            multiply(dx.view(rows.shape)[part], logits, weight)
        if wanted[1]:
            multiply(dweight, logits.t(), rows[part], more=begin > 0)
        if wanted[2]:
            add_columns(dbias, logits, more=begin > 0)
    return losses, statistics, found


@float32_sums()
def _plain(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    options: Options,
    chunk_rows: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of the rows and their statistics, by chunks of rows."""
    rows, labels = _rows(x, target)
    step = config(len(rows), len(weight), x.dtype, chunk_rows).rows
    buffer = torch.empty((min(step, len(rows)), len(weight)), dtype=x.dtype, device=x.device)
    found = []
    for begin in range(0, max(len(rows), 1), step):
        part = slice(begin, min(begin + step, len(rows)))
        logits = buffer[: part.stop - begin]
        write_logits(logits, rows[part], weight, bias)
        found.append(_losses(logits, labels[part], *options))
    losses, statistics = zip(*found, strict=True)
    return torch.cat(losses), torch.cat(statistics, 1)


@float32_sums()
def _late(
    dloss: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    statistics: torch.Tensor,
    count: torch.Tensor,
    options: Options,
    mean: bool,
    chunk_rows: int | None,
    wanted: Wanted,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All gradients from ``dloss``, by chunks of classes, whose logits are computed again: each row of the
    weight's is one product over all rows, and rounded once."""
    rows, labels = _rows(x, target)
    dx, dweight, dbias = _gradients(x, weight, wanted, wide=False)
    total = torch.zeros(rows.shape if wanted[0] else (0,), dtype=torch.float32, device=x.device)
    upstream = dloss.reshape(-1) if dloss.ndim else dloss
    step = config(len(rows), len(weight), x.dtype, chunk_rows).classes
    buffer = torch.empty(len(rows) * step, dtype=x.dtype, device=x.device)
    for begin in range(0, len(weight), step):
        part = slice(begin, min(begin + step, len(weight)))
        shape = len(rows), part.stop - begin
        logits = buffer[: math.prod(shape)].view(shape)
        write_logits(logits, rows, weight[part], None if bias is None else bias[part])
        write_gradient(logits, upstream, logits, labels, statistics, count, *options, mean, begin, len(weight))
        if wanted[0]:
            multiply(total, logits, weight[part], more=begin > 0)
        if wanted[1]:
            multiply(dweight[part], logits.t(), rows)
        if wanted[2]:
            add_columns(dbias[part], logits, more=False)
    if wanted[0]:
        dx.view(rows.shape).copy_(total)
    return dx, dweight, dbias


# The custom operators write "no softcap" as 0.0: their schemas then have no optional numbers.
@torch.library.custom_op("reference_kernels::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    chunk_rows: int | None,
    for_x: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss; the rows' statistics and how many rows count (empty for "none"); and the gradients that are needed
    already now, those by ``x`` and bias in float32."""
    options, wanted = (ignore_index, smoothing, z_loss, softcap), (for_x, for_weight, for_bias)
    if any(wanted):
        losses, statistics, found = _early(x, weight, bias, target, options, reduction == "mean", chunk_rows, wanted)
    else:
        losses, statistics = _plain(x, weight, bias, target, options, chunk_rows)
        found = _gradients(x, weight, wanted, wide=True)
    if reduction == "none":
        return losses.view(target.shape), statistics, losses.new_empty(0), *found
    loss, count = _total(losses, statistics, reduction == "mean")
    return loss, statistics, count, *found


@_linear_cross_entropy.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    every = others[5] == "none"
    loss, statistics, count = (
        torch.empty(shape, dtype=torch.float32, device=x.device)
        for shape in (target.shape if every else (), (2, target.numel()), (0,) if every else ())
    )
    return loss, statistics, count, *_gradients(x, weight, others[7:], wide=True)


@torch.library.custom_op("reference_kernels::linear_cross_entropy_backward", mutates_args=())
def _linear_cross_entropy_backward(
    dloss: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    statistics: torch.Tensor,
    count: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    chunk_rows: int | None,
    early: bool,
    for_x: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All from the inputs. ``early``: to the bit what forward had computed, times ``dloss``."""
    options, mean = (ignore_index, smoothing, z_loss, softcap), reduction == "mean"
    wanted = for_x, for_weight, for_bias
    if not early:
        return _late(dloss, x, weight, bias, target, statistics, count, options, mean, chunk_rows, wanted)
    dx, dweight, dbias = _early(x, weight, bias, target, options, mean, chunk_rows, wanted)[2]
    _scale(dweight, dloss)
    return (dx * dloss).to(x.dtype), dweight, (dbias * dloss).to(x.dtype)


@_linear_cross_entropy_backward.register_fake
def _(
    _: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _gradients(x, weight, others[-3:], wide=False)


@torch.library.custom_op("reference_kernels::linear_cross_entropy_scale", mutates_args=("dweight",))
def _linear_cross_entropy_scale(
    dloss: torch.Tensor, dx: torch.Tensor, dweight: torch.Tensor, dbias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What forward had computed, times ``dloss``: the weight's in place."""
    _scale(dweight, dloss)
    return (dx * dloss).to(dweight.dtype), (dbias * dloss).to(dweight.dtype)


@_linear_cross_entropy_scale.register_fake
def _(
    _: torch.Tensor, dx: torch.Tensor, dweight: torch.Tensor, dbias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(dx, dtype=dweight.dtype), torch.empty_like(dbias, dtype=dweight.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, target, bias, *ctx.options, for_x, for_weight, for_bias = inputs
    ctx.early = for_x, for_weight, for_bias
    # Used up by the first backward, which scales the weight's in place: a later one computes them again.
    ctx.ready = output[3:] if any(ctx.early) else None
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else torch fills zeros for the statistics and the gradients
    ctx.save_for_backward(x, weight, target, bias, *output[1:3])


def _differentiate(ctx: Any, dloss: torch.Tensor | None, *_: object) -> tuple[Any, ...]:
    if dloss is None:
        return (None,) * 13
    ready, ctx.ready = ctx.ready, None
    wanted = ctx.early if any(ctx.early) else [ctx.needs_input_grad[place] for place in (0, 1, 3)]
    # With create_graph the operator that has no derivative says so; scaled buffers would leave the term out.
    if ready is not None and not torch.is_grad_enabled():
        dx, dweight, dbias = ready
        if type(dloss) is not torch.Tensor:  # traced: what forward returns must not be what backward writes to
            dweight = dweight.clone()
        dx, dbias = _linear_cross_entropy_scale(dloss, dx, dweight, dbias)
        found = dx, dweight, dbias
    else:
        found = _linear_cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.options, any(ctx.early), *wanted)
    dx, dweight, dbias = (d if needed else None for d, needed in zip(found, wanted, strict=True))
    return dx, dweight, None, dbias, *[None] * 9


_linear_cross_entropy.register_autograd(_differentiate, setup_context=_save)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    gradients: Gradients = "backward",
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """Cross-entropy of the logits ``x @ weight.T + bias`` and int64 labels ``target`` ``(*batch)``, in float32.

    ``x`` is ``(*batch, hidden)``, ``weight`` ``(vocab, hidden)`` as in `torch.nn.Linear`, ``bias`` ``(vocab,)``, all of
    one dtype: float32, float16 or bfloat16; any strides. The loss is of every row, ``(*batch)``, for
    ``reduction="none"``, else their sum or mean, 0-d. The options are `cross_entropy`'s. Logits exist for
    ``chunk_rows`` rows at a time, or as many as 256 MiB hold, rounded to their dtype. Differentiable once by ``x``,
    ``weight`` and ``bias``.

    ``gradients`` says when they are computed. ``"backward"``: when they are needed, from logits computed again; each
    is rounded once. ``"forward"``: along with the loss, a quarter less work; that of ``weight`` is rounded after each
    chunk of rows, and again by an upstream gradient other than 1. See `linear_cross_entropy_reference`.

    Raises `TypeError` for other or mixed dtypes; `ValueError` for shapes that do not fit, options out of range, mixed
    devices, and ``gradients="forward"`` for float16 or ``reduction="none"``, which have to know the upstream gradient.
    """
    name = "linear_cross_entropy"
    check_options(name, label_smoothing, z_loss, softcap, reduction)
    if gradients not in get_args(Gradients):
        raise ValueError(f"{name}: gradients is {gradients!r}, known: {', '.join(get_args(Gradients))}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"{name}: chunk_rows is {chunk_rows}, allowed: None, or 1 and more")
    check_operands(name, x, {"weight": weight})
    check_tensor(name, "target", target, x, (torch.int64,))
    if target.shape != x.shape[:-1]:
        raise ValueError(
            f"{name}: x has shape {tuple(x.shape)}, target {tuple(target.shape)}; "
            "they are (*batch, hidden) and (*batch)"
        )
    if bias is not None:
        check_tensor(name, "bias", bias, x, (x.dtype,))
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}, weight needs ({weight.shape[0]},)")
    if gradients == "forward" and (reduction == "none" or x.dtype == torch.float16):
        found = "reduction='none'" if reduction == "none" else "float16"
        raise ValueError(
            f"{name}: gradients='forward' and {found}, whose gradients depend on the upstream one before they are "
            "rounded and summed; use gradients='backward'"
        )
    now = gradients == "forward" and torch.is_grad_enabled()
    needed = [now and tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)]
    options = ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0), reduction, chunk_rows
    loss: torch.Tensor = _linear_cross_entropy(x, weight, target, bias, *options, *needed)[0]
    return loss
