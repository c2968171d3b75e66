"""Fused gating: softmax, the k largest and their weights in one launch, and the gradient of the logits in another."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from reference_kernels._common import FLOATS, INTERPRETED, Rows, RowTile, check_tensor, jit, placed, row_offset
from reference_kernels._order import HIGHEST, of_order_key, order_key
from reference_kernels._powers import exponential

MOST_EXPERTS = 4096
MOST_CHOSEN = 64  # one pass over the tile each, so a sort is the better choice for many more
MOST_ROUNDS = 8  # written out one after the other; more are a loop
NOTHING = tl.constexpr(-(2**31) + 1)  # below every key
NO_NUMBER = tl.constexpr(2**31 - 1)


def config(experts: int, backward: bool = False, *, interpreted: bool = INTERPRETED) -> RowTile:
    """Tile for rows of ``experts`` logits: all experts of a row, and 32 logits for a thread, ``backward`` 8. A warp of
    its own for each tile of up to 1024, or 256, spares the exchange between warps."""
    columns = max(16, triton.next_power_of_2(experts))
    elements = 256 if backward else 1024
    rows = max(1, min(64, (4096 if interpreted else elements) // columns))
    return RowTile(rows, columns, max(1, min(8, rows * columns // elements)), loop=False)


def group_of(columns: int, chosen: int, itemsize: int) -> int:
    """Neighbours in a group, so that rounds go over the fewest numbers, ``columns / group + chosen * group``; of
    equally many the group that is read 16 bytes at a time."""

    def cost(group: int) -> tuple[int, int]:
        return columns // group + (chosen * group if group > 1 else 0), abs(group * itemsize - 16)

    return min((1, 2, 4, 8, 16), key=cost)


@jit
def _loaded(x_row: tl.tensor, column: tl.tensor, inside: tl.tensor, step: tl.tensor) -> tl.tensor:
    """Logits in float32, ``-inf`` where there is none: it adds nothing."""
    return tl.load(x_row + column * step, mask=inside, other=float("-inf")).to(tl.float32)


@jit
def _round(
    keys: tl.tensor, numbers: tl.tensor, best: tl.tensor, which: tl.tensor, here: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The largest of each row of ``keys``, of equal ones that with the lowest number, put ``here`` and taken out."""
    largest = tl.max(keys, axis=1, keep_dims=True)
    first = tl.min(tl.where(keys == largest, numbers, NO_NUMBER), axis=1, keep_dims=True)
    keys = tl.where(numbers == first, NOTHING, keys)
    return keys, tl.where(here, largest, best), tl.where(here, first, which)


@jit
def _largest(
    keys: tl.tensor, numbers: tl.tensor, chosen: tl.tensor, turns: tl.tensor, ROUNDS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The ``chosen`` largest of each row of ``keys`` and their ``numbers``: that of each of the ``turns``, counted from
    the largest. A round takes two reductions of 32 bits, not one of 64. A number that is there twice counts once.
    ``NOTHING`` is below every key, ``NO_NUMBER`` above every number. ``ROUNDS`` is ``chosen``, or 0 for a loop."""
    best = tl.full([keys.shape[0], turns.shape[1]], NOTHING, tl.int32)
    which = tl.full([keys.shape[0], turns.shape[1]], 0, tl.int32)
    if ROUNDS > 0:
        for turn in tl.static_range(ROUNDS):
            keys, best, which = _round(keys, numbers, best, which, turns == turn)
    else:
        for turn in range(chosen):
            keys, best, which = _round(keys, numbers, best, which, turns == turn)
    return best, which


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
    GROUP: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One tile of rows. Outputs are contiguous ``(rows, chosen)``.

    Experts come in groups of ``GROUP`` neighbours. The ``chosen`` largest logits lie in the ``chosen`` groups with the
    largest maxima, those of equal ones with lower numbers: whatever lies in another group comes after the maximum of
    each of these. So rounds go over the groups' maxima first, and then over what lies in the groups found.
    """
    GROUPS: tl.constexpr = BLOCK_COLUMNS // GROUP
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    slot = tl.arange(0, BLOCK_CHOSEN)[None, :]
    x_row = x_ptr + row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2)
    member = tl.arange(0, GROUP)[None, None, :]
    column = tl.arange(0, GROUPS)[None, :, None] * GROUP + member
    inside = (row < rows)[:, :, None] & (column < width)
    x = _loaded(x_row[:, :, None], column, inside, x_step)
    keys = tl.where(inside, order_key(x), NOTHING)
    if GROUP == 1:
        keys = tl.reshape(keys, [BLOCK_ROWS, GROUPS])
        best, which = _largest(keys, tl.arange(0, GROUPS)[None, :], chosen, slot, ROUNDS)
    else:
        # Columns of the groups' members side by side: three dimensions here took layouts that Triton 3.6 got wrong.
        place = tl.arange(0, BLOCK_CHOSEN * GROUP)[None, :]
        _, group = _largest(tl.max(keys, axis=2), tl.arange(0, GROUPS)[None, :], chosen, place // GROUP, ROUNDS)
        near = group * GROUP + place % GROUP
        found = (row < rows) & (place < chosen * GROUP) & (near < width)
        again = tl.where(found, order_key(_loaded(x_row, near, found, x_step)), NOTHING)
        best, which = _largest(again, near, chosen, slot, ROUNDS)

    stored = (row < rows) & (slot < chosen)
    key = tl.where(stored, best, 0)
    logit = tl.where(key == HIGHEST, float("nan"), of_order_key(key))
    peak = tl.sum(tl.where(slot == 0, logit, 0.0), axis=1, keep_dims=True)
    power = tl.where(stored, exponential(logit - peak), 0.0)
    if RENORMALIZE:
        total = tl.sum(power, axis=1, keep_dims=True)
    else:
        powers = tl.where(inside, exponential(x - peak[:, :, None]), 0.0)
        total = tl.sum(tl.sum(powers, axis=2), axis=1, keep_dims=True)
    tl.store(weights_ptr + row * chosen + slot, power / total, mask=stored)
    tl.store(experts_ptr + row * chosen + slot, which.to(tl.int64), mask=stored)


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
    power = tl.where(part, exponential(power - tl.max(power, axis=1, keep_dims=True)), 0.0)
    p = power / tl.sum(power, axis=1, keep_dims=True)
    dx = tl.where(part, p * (dp - tl.sum(p * dp, axis=1, keep_dims=True)), 0.0)
    tl.store(dx_ptr + row * width + column, dx, mask=inside)


def _launch(
    kernel: Any, out: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...], tile: RowTile, k: int, **more: Any
) -> None:
    """``kernel`` on at least one row and one expert; the logits are the last input."""
    rows = Rows.of(*inputs)
    width = inputs[-1].shape[-1]
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
        chosen = triton.next_power_of_2(k)
        tile = config(logits.shape[-1])
        group = group_of(tile.columns, chosen, logits.element_size())
        rounds = k if k <= MOST_ROUNDS else 0
        more = {"RENORMALIZE": renormalize, "GROUP": group, "ROUNDS": rounds, "BLOCK_CHOSEN": chosen}
        _launch(_moe_gate_kernel, out, (logits,), tile, k, **more)
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
    tile = config(logits.shape[-1], True)
    _launch(_moe_gate_backward_kernel, (dx, experts), (dy, logits), tile, dy.shape[-1], RENORMALIZE=renormalize)
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
