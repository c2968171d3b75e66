"""Fused low-rank adaptation: a product and the product of its two thin factors in one sum; with all gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from reference_kernels._common import INTERPRETED, Rows, check_tensor, jit, placed, row_offset
from reference_kernels.linear.backward import as_matrix, weight_gradient
from reference_kernels.linear.descriptors import matrix_of, summed_by_tiles
from reference_kernels.linear.products import MatmulTile, by_pointers, check_operands, config, grouped, two_products
from reference_kernels.linear.thin import room_of, thin_rows, thin_sums

MOST = 128  # ranks: every program multiplies its rows by all of ``down``, whose tile is that wide


def config_lora(
    rows: int, columns: int, depth: int, rank: int, dtype: torch.dtype, *, interpreted: bool = INTERPRETED
) -> tuple[MatmulTile, int]:
    """For operands without descriptors: the tile of the plain product by pointers, and the rank that it is given room
    for; past 32 narrower for few rows, since the tile of ``down`` takes shared memory beside the weight's, and for 8
    warps or, on ordinary cores past 64, half as high, for the registers.

    Not narrower where ``depth`` is 1, a constant then, for which no stages take shared memory: of 32 columns ptxas 12.8
    makes code for sm_90 that adds to a uniform register which nothing wrote, and gradients were wrong on an H100.
    """
    room = room_of(rank)
    tile = by_pointers(config(rows, columns, depth, dtype, interpreted=interpreted), warps=4 if room <= 32 else 8)
    if room > 32:
        few = rows <= 64 and dtype != torch.float32 and not interpreted
        tile = replace(tile, n=64 if depth == 1 else 32, k=128, stages=4) if few else tile
    if room > 64 and dtype == torch.float32:
        tile = replace(tile, m=min(tile.m, 32))
    return tile, room


def config_described(rows: int, columns: int, depth: int, dtype: torch.dtype) -> MatmulTile | None:
    """The tile by descriptors, ``None`` where the result is small or of float32.

    What ``up`` is multiplied by has a launch of its own, 19 us of 431 us at 8192 x 4096 x 4096 on an H200: within the
    steps of the large product the narrow operands take longer to read than to multiply, and it takes 518 us.
    """
    tile = config(rows, columns, depth, dtype)
    return tile if tile.resident else None


@jit
def _lora_kernel(
    y_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    down_ptr: tl.tensor,
    up_ptr: tl.tensor,
    scale: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    R: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    weight_stride_n: tl.tensor,
    weight_stride_k: tl.tensor,
    down_stride_r: tl.tensor,
    down_stride_k: tl.tensor,
    up_stride_n: tl.tensor,
    up_stride_r: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """One ``BLOCK_M x BLOCK_N`` tile of ``y``, contiguous ``(M, N)``; the other operands have strides of their own."""
    block_m, block_n = grouped(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R).to(tl.int64)
    x_rows = x_ptr + row_offset(m, size1, size2, x_stride0, x_stride1, x_stride2)
    m_inside = (m < M)[:, None]
    n_inside = (n < N)[None, :]
    total, low = two_products(
        x_rows,
        weight_ptr,
        down_ptr,
        n,
        r,
        m_inside,
        n_inside,
        (r < R)[None, :],
        K,
        x_step,
        weight_stride_n,
        weight_stride_k,
        down_stride_r,
        down_stride_k,
        BLOCK_M,
        BLOCK_N,
        BLOCK_R,
        BLOCK_K,
    )
    # Beyond the rank an infinity of x has met zeros: that NaN must not meet the zeros of up.
    low = tl.where((r < R)[None, :], low * scale, 0.0).to(y_ptr.dtype.element_ty)
    up_ptrs = up_ptr + (r * up_stride_r)[:, None] + (n * up_stride_n)[None, :]
    up = tl.load(up_ptrs, mask=(r < R)[:, None] & n_inside, other=0.0)
    total = tl.dot(low, up, total, input_precision="ieee")
    tl.store(y_ptr + m[:, None] * N + n[None, :], total, mask=m_inside & n_inside)


def _fill(
    y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
    low: torch.Tensor | None = None,
) -> None:
    """``y`` of `lora_linear`; ``low`` is ``scale * x @ down.T`` as `thin_rows` has it, where that is known already."""
    if y.numel() == 0:
        return
    N, K = weight.shape
    rows = Rows.of(x)
    tile = config_described(rows.count, N, K, x.dtype)
    if tile is not None and rows.sizes[1:] == (1, 1):
        out, matrix = y.view(rows.count, N), as_matrix(x)
        if all(matrix_of(each, (tile.n, tile.k)) for each in (out, matrix, weight, up)):
            low = thin_rows(x, down, scale) if low is None else low
            if summed_by_tiles(out, [matrix, low[:, : len(down)]], [weight.t(), up.t()], tile):
                return
    tile, room = config_lora(rows.count, N, K, len(down), x.dtype)
    with placed(x.device):
        _lora_kernel[(triton.cdiv(rows.count, tile.m) * triton.cdiv(N, tile.n),)](
            y,
            *rows.tensors,
            weight,
            down,
            up,
            scale,
            rows.count,
            N,
            K,
            len(down),
            *rows.layout,
            *weight.stride(),
            *down.stride(),
            *up.stride(),
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            BLOCK_R=room,
            GROUP=tile.group,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


@torch.library.custom_op("reference_kernels::lora_linear", mutates_args=())
def _lora_linear(
    x: torch.Tensor, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float
) -> torch.Tensor:
    y = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)
    _fill(y, x, weight, down, up, scale)
    return y


@_lora_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)


@torch.library.custom_op("reference_kernels::lora_linear_backward", mutates_args=())
def _lora_linear_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
    of_x: bool,
    of_down: bool,
    of_up: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients by ``x`` and by the factors, empty where not needed: that by ``x`` is a product with two thin
    factors as well, on transposed views."""
    dx, ddown, dup = _gradients(x, down, up, of_x, of_down, of_up)
    low = thin_rows(dy, up.t(), scale) if of_down else None
    if of_x:
        _fill(dx, dy, weight.t(), up.t(), down.t(), scale, low)
    if low is not None:
        thin_sums(ddown, low, as_matrix(x))
    if of_up:
        thin_sums(dup.t(), thin_rows(x, down, scale), as_matrix(dy))
    return dx, ddown, dup


@_lora_linear_backward.register_fake
def _(
    _: torch.Tensor, x: torch.Tensor, __: torch.Tensor, down: torch.Tensor, up: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _gradients(x, down, up, *others[1:])


def _gradients(
    x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, *wanted: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, ddown, dup = (
        torch.empty(t.shape if needed else (0,), dtype=t.dtype, device=t.device)
        for t, needed in zip((x, down, up), wanted, strict=True)
    )
    return dx, ddown, dup


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 -- passed by name
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight, down, up = ctx.saved_tensors
    of_x, of_weight, of_down, of_up, _ = ctx.needs_input_grad
    wanted, found = (of_x, of_down, of_up), (None, None, None)
    if any(wanted):
        found = _lora_linear_backward(dy, x, weight, down, up, ctx.scale, *wanted)
    dx, ddown, dup = (each if needed else None for each, needed in zip(found, wanted, strict=True))
    dweight = weight_gradient(as_matrix(dy), as_matrix(x)) if of_weight else None
    return dx, dweight, ddown, dup, None


_lora_linear.register_autograd(_differentiate, setup_context=_save)


def lora_linear(
    x: torch.Tensor, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """``x @ weight.T + scale * (x @ down.T) @ up.T``: ``(*batch, k)`` by ``(n, k)``, ``(r, k)`` and ``(n, r)`` to
    contiguous ``(*batch, n)``.

    All operands share one dtype (float32, float16 or bfloat16) and may have any strides; ``r`` is 128 at most. Sums in
    float32 without TF32; what ``up`` is multiplied by is rounded to the dtype, and the result: see
    `lora_linear_reference`. Differentiable once by all four. Raises `TypeError` for other or mixed dtypes;
    `ValueError` for shapes that do not fit, or mixed devices.
    """
    check_operands("lora_linear", x, {"weight": weight, "down": down})
    check_tensor("lora_linear", "up", up, x, (x.dtype,))
    if up.shape != (len(weight), len(down)):
        raise ValueError(
            f"lora_linear: up has shape {tuple(up.shape)}, weight {tuple(weight.shape)} and down {tuple(down.shape)} "
            f"ask for ({len(weight)}, {len(down)}): down is (r, k) and up (n, r)"
        )
    if len(down) > MOST:
        raise ValueError(f"lora_linear: the rank is {len(down)}, supported: 0 to {MOST}; merge up @ down into weight")
    y: torch.Tensor = _lora_linear(x, weight, down, up, float(scale))
    return y
