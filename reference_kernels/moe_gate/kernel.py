"""Fused gating: softmax, the k largest and their weights in one launch, and the gradient of the logits in another."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from reference_kernels._common import FLOATS, INTERPRETED, Rows, RowTile, check_tensor, jit, placed, row_offset
from reference_kernels._order import HIGHEST, of_order_key, order_key

MOST_EXPERTS = 4096
MOST_CHOSEN = 64  # one pass over the tile each, so a sort is the better choice for many more
NOTHING = tl.constexpr(-(2**63) + 1)  # below every key with an expert's number


def config(experts: int, *, interpreted: bool = INTERPRETED) -> RowTile:
    """Tile for rows of ``experts`` logits: all experts of a row, and as many rows as keep a thread at
    16 logits, so that the 64-bit numbers that are compared take 32 registers. A warp of its own for each row of 512
    spares the exchange between warps."""
    columns = max(16, triton.next_power_of_2(experts))
    elements = 4096 if interpreted else 2048
    rows = max(1, min(64, elements // columns))
    return RowTile(rows, columns, max(1, min(8, rows * columns // 512)), loop=False)


@jit
def _loaded(x_row: tl.tensor, column: tl.tensor, inside: tl.tensor, step: tl.tensor) -> tl.tensor:
    """Logits in float32, ``-inf`` where there is none: it adds nothing."""
    return tl.load(x_row + column * step, mask=inside, other=float("-inf")).to(tl.float32)


@jit
def _moe_gate_kernel(
    weights_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    x_ptr: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    chosen: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    RENORMALIZE: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One tile of rows. Outputs are contiguous ``(rows, chosen)``.

    Each round takes the maximum of 64-bit numbers, the logit's key above the expert's number counted from the end: one
    reduction finds both, and of equal logits the lower number.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :].to(tl.int64)
    slot = tl.arange(0, BLOCK_CHOSEN)[None, :].to(tl.int64)
    inside = (row < rows) & (column < width)
    x = _loaded(x_ptr + row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2), column, inside, x_step)

    left = tl.where(inside, (order_key(x).to(tl.int64) << SHIFT) | (BLOCK_COLUMNS - 1 - column), NOTHING)
    best = tl.full([BLOCK_ROWS, BLOCK_CHOSEN], NOTHING, tl.int64)
    for turn in range(chosen):
        largest = tl.max(left, axis=1, keep_dims=True)
        best = tl.where(slot == turn, largest, best)
        left = tl.where(left == largest, NOTHING, left)

    stored = (row < rows) & (slot < chosen)
    expert = BLOCK_COLUMNS - 1 - (best & (BLOCK_COLUMNS - 1))
    key = tl.where(stored, (best >> SHIFT).to(tl.int32), 0)
    logit = tl.where(key == HIGHEST, float("nan"), of_order_key(key))
    peak = tl.sum(tl.where(slot == 0, logit, 0.0), axis=1, keep_dims=True)
    power = tl.where(stored, tl.exp(logit - peak), 0.0)
    if RENORMALIZE:
        total = tl.sum(power, axis=1, keep_dims=True)
    else:
        total = tl.sum(tl.where(inside, tl.exp(x - peak), 0.0), axis=1, keep_dims=True)
    tl.store(weights_ptr + row * chosen + slot, power / total, mask=stored)
    tl.store(experts_ptr + row * chosen + slot, expert, mask=stored)


@jit
def _moe_gate_backward_kernel(
    dx_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    x_ptr: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    chosen: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    dy_stride0: tl.tensor,
    dy_stride1: tl.tensor,
    dy_stride2: tl.tensor,
    dy_step: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    RENORMALIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One tile of rows: ``p * (dp - sum(p * dp))`` over the experts that the softmax was taken over."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :].to(tl.int64)
    inside = (row < rows) & (column < width)
    x = _loaded(x_ptr + row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2), column, inside, x_step)

    dy_row = dy_ptr + row_offset(row, size1, size2, dy_stride0, dy_stride1, dy_stride2)
    dp = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    part = inside
    if RENORMALIZE:
        part = inside & (column < 0)
    for turn in range(chosen):
        expert = tl.load(experts_ptr + row * chosen + turn, mask=row < rows, other=-1)
        own = tl.load(dy_row + turn * dy_step, mask=row < rows, other=0.0).to(tl.float32)
        here = column == expert
        dp = tl.where(here, own, dp)
        if RENORMALIZE:
            part = part | here
    power = tl.where(part, x, float("-inf"))
    power = tl.where(part, tl.exp(power - tl.max(power, axis=1, keep_dims=True)), 0.0)
    p = power / tl.sum(power, axis=1, keep_dims=True)
    dx = tl.where(part, p * (dp - tl.sum(p * dp, axis=1, keep_dims=True)), 0.0)
    tl.store(dx_ptr + row * width + column, dx, mask=inside)


def _launch(kernel: Any, out: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...], k: int, **more: Any) -> None:
    """``kernel`` on at least one row and one expert; the logits are the last input."""
    rows = Rows.of(*inputs)
    width = inputs[-1].shape[-1]
    tile = config(width)
    with placed(inputs[-1].device):
        kernel[(triton.cdiv(rows.count, tile.rows),)](
            *out,
            *rows.tensors,
            rows.count,
            width,
            k,
            *rows.layout,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
            **more,
        )


def _empty(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*logits.shape[:-1], k)
    weights = torch.empty(shape, dtype=logits.dtype, device=logits.device)
    return weights, torch.empty(shape, dtype=torch.int64, device=logits.device)


@torch.library.custom_op("reference_kernels::moe_gate", mutates_args=())
def _moe_gate(logits: torch.Tensor, k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    out = _empty(logits, k)
    if out[0].numel():
        columns = config(logits.shape[-1]).columns
        chosen = triton.next_power_of_2(k)
        shift = columns.bit_length() - 1
        _launch(_moe_gate_kernel, out, (logits,), k, RENORMALIZE=renormalize, SHIFT=shift, BLOCK_CHOSEN=chosen)
    return out


@_moe_gate.register_fake
def _(logits: torch.Tensor, k: int, _: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(logits, k)


@torch.library.custom_op("reference_kernels::moe_gate_backward", mutates_args=())
def _moe_gate_backward(
    dy: torch.Tensor, experts: torch.Tensor, logits: torch.Tensor, renormalize: bool
) -> torch.Tensor:
    if dy.numel() == 0:
        return torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _launch(_moe_gate_backward_kernel, (dx, experts), (dy, logits), dy.shape[-1], RENORMALIZE=renormalize)
    return dx


@_moe_gate_backward.register_fake
def _(_: torch.Tensor, __: torch.Tensor, logits: torch.Tensor, ___: bool) -> torch.Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, _, ctx.renormalize = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1])


def _differentiate(ctx: Any, dy: torch.Tensor, _: object) -> tuple[Any, ...]:
    logits, experts = ctx.saved_tensors
    return _moe_gate_backward(dy, experts, logits, ctx.renormalize), None, None


_moe_gate.register_autograd(_differentiate, setup_context=_save)


def moe_gate(logits: torch.Tensor, k: int, renormalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` experts with the largest ``logits`` and their weights, ``(*batch, k)`` each, largest first.

    ``logits`` is ``(*batch, experts)`` in float32, float16 or bfloat16 with any strides. The weights have its dtype and
    are its softmax, over the chosen alone if ``renormalize``; the experts' numbers are int64. See `moe_gate_reference`
    for ties and NaN. Differentiable once by ``logits``, in one launch. Raises `TypeError` for other dtypes;
    `ValueError` for no dimension, a ``k`` past the number of experts or `MOST_CHOSEN`, experts past `MOST_EXPERTS`.
    """
    check_tensor("moe_gate", "logits", logits, logits, FLOATS)
    if logits.ndim == 0:
        raise ValueError("moe_gate: logits have no dimension to choose from; give them at least one")
    if logits.shape[-1] > MOST_EXPERTS:
        raise ValueError(f"moe_gate: there are {logits.shape[-1]} experts, supported: up to {MOST_EXPERTS}")
    most = min(logits.shape[-1], MOST_CHOSEN)
    if not 0 <= k <= most:
        raise ValueError(f"moe_gate: k is {k}, allowed with {logits.shape[-1]} experts: 0 to {most}")
    weights, experts = _moe_gate(logits, k, renormalize)
    return weights, experts
