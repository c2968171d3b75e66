"""Fused gated linear unit: activation and product in one launch, and both gradients in another."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl

from reference_kernels._activations import activated, slope
from reference_kernels._common import FLOATS, INTERPRETED, Rows, RowTile, check_tensor, jit, placed, row_offset

Activation = Literal["silu", "gelu", "gelu_tanh"]


def config(width: int, dtype: torch.dtype, *, interpreted: bool = INTERPRETED) -> RowTile:
    """Tile for rows of ``width`` elements of ``dtype``; a row wider than the tile takes several programs.

    Two loads of 16 bytes for each thread and tensor: enough under way to hide memory, few enough registers for full
    occupancy. Interpreted, tiles are narrow so that small cases have rows of several.
    """
    warps = 4
    elements = 4096 if interpreted else warps * 32 * 2 * 16 // dtype.itemsize
    widest = 128 if interpreted and width <= 512 else min(elements, 1024) if interpreted else elements
    columns = min(widest, max(16, triton.next_power_of_2(width)))
    return RowTile(elements // columns, columns, warps, loop=False)


@jit
def _place(
    column_blocks: tl.tensor, FLAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The rows and columns of this program (int64). ``FLAT``: there is one row, which the compiler then knows."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
    column = tl.arange(0, BLOCK_COLUMNS)[None, :].to(tl.int64)
    if FLAT:
        column += program * BLOCK_COLUMNS
    else:
        row += program // column_blocks * BLOCK_ROWS
        column += program % column_blocks * BLOCK_COLUMNS
    return row, column


@jit
def _glu_kernel(
    y_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    column_blocks: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    gate_stride0: tl.tensor,
    gate_stride1: tl.tensor,
    gate_stride2: tl.tensor,
    gate_step: tl.tensor,
    up_stride0: tl.tensor,
    up_stride1: tl.tensor,
    up_stride2: tl.tensor,
    up_step: tl.tensor,
    ACTIVATION: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One tile of ``y``, contiguous ``(rows, width)``; both inputs have strides of their own."""
    row, column = _place(column_blocks, FLAT, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < rows) & (column < width)
    gate_at = row_offset(row, size1, size2, gate_stride0, gate_stride1, gate_stride2) + column * gate_step
    up_at = row_offset(row, size1, size2, up_stride0, up_stride1, up_stride2) + column * up_step
    gate = tl.load(gate_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + up_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + column, activated(gate, ACTIVATION) * up, mask=inside)


@jit
def _glu_backward_kernel(
    dgate_ptr: tl.tensor,
    dup_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    d_stride: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    column_blocks: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    dy_stride0: tl.tensor,
    dy_stride1: tl.tensor,
    dy_stride2: tl.tensor,
    dy_step: tl.tensor,
    gate_stride0: tl.tensor,
    gate_stride1: tl.tensor,
    gate_stride2: tl.tensor,
    gate_step: tl.tensor,
    up_stride0: tl.tensor,
    up_stride1: tl.tensor,
    up_stride2: tl.tensor,
    up_step: tl.tensor,
    ACTIVATION: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One tile of both gradients, whose rows are ``d_stride`` elements apart: one half each, or two tensors."""
    row, column = _place(column_blocks, FLAT, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < rows) & (column < width)
    dy_at = row_offset(row, size1, size2, dy_stride0, dy_stride1, dy_stride2) + column * dy_step
    gate_at = row_offset(row, size1, size2, gate_stride0, gate_stride1, gate_stride2) + column * gate_step
    up_at = row_offset(row, size1, size2, up_stride0, up_stride1, up_stride2) + column * up_step
    dy = tl.load(dy_ptr + dy_at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + up_at, mask=inside, other=0.0).to(tl.float32)
    d_at = row * d_stride + column
    tl.store(dgate_ptr + d_at, dy * up * slope(gate, ACTIVATION), mask=inside)
    tl.store(dup_ptr + d_at, dy * activated(gate, ACTIVATION), mask=inside)


def _forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel():
        _launch(_glu_kernel, (y,), (gate, up), activation)
    return y


def _launch(
    kernel: Any, out: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...], activation: str, *strides: int
) -> None:
    """``kernel`` on tensors of one shape, at least one element; as a single row where all of them are contiguous,
    which spares narrow and odd rows their tails."""
    flat = all(tensor.is_contiguous() for tensor in (*out, *inputs))
    rows = Rows.of(*(tensor.view(-1) for tensor in inputs) if flat else inputs)
    tile = config(rows.width, out[0].dtype)
    blocks = triton.cdiv(rows.width, tile.columns)
    with placed(out[0].device):
        kernel[(triton.cdiv(rows.count, tile.rows) * blocks,)](
            *out,
            *rows.tensors,
            *strides,
            rows.count,
            rows.width,
            blocks,
            *rows.sizes[1:],
            *(stride for four in rows.strides for stride in four),
            ACTIVATION=activation,
            FLAT=flat,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )


@torch.library.custom_op("reference_kernels::glu", mutates_args=())
def _glu(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    return _forward(gate, up, activation)


@_glu.register_fake
def _(gate: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@torch.library.custom_op("reference_kernels::glu_backward", mutates_args=())
def _glu_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    if dy.numel():
        _launch(_glu_backward_kernel, (dgate, dup), (dy, gate, up), activation, gate.shape[-1])
    return dgate, dup


@_glu_backward.register_fake
def _(_: torch.Tensor, gate: torch.Tensor, *__: object) -> tuple[torch.Tensor, torch.Tensor]:
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    return dgate, dup


@torch.library.custom_op("reference_kernels::glu_packed", mutates_args=())
def _glu_packed(x: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return _forward(gate, up, activation)


@_glu_packed.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


@torch.library.custom_op("reference_kernels::glu_packed_backward", mutates_args=())
def _glu_packed_backward(dy: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dy.numel():
        _launch(_glu_backward_kernel, dx.chunk(2, dim=-1), (dy, *x.chunk(2, dim=-1)), activation, x.shape[-1])
    return dx


@_glu_packed_backward.register_fake
def _(_: torch.Tensor, x: torch.Tensor, *__: object) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 -- passed by name
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return *_glu_backward(dy, *ctx.saved_tensors, ctx.activation), None


def _differentiate_packed(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return _glu_packed_backward(dy, *ctx.saved_tensors, ctx.activation), None


_glu.register_autograd(_differentiate, setup_context=_save)
_glu_packed.register_autograd(_differentiate_packed, setup_context=_save)


def glu(gate: torch.Tensor, up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """``activation(gate) * up``: two tensors ``(*batch, hidden)`` to a contiguous one, of their dtype.

    float32, float16 or bfloat16, one dtype for both, with any strides. In float32 throughout, rounded once: see
    `glu_reference`. Differentiable once by both inputs, in one launch. Raises `TypeError` for other or mixed dtypes;
    `ValueError` for shapes that differ, no dimension, an unknown activation, or mixed devices.
    """
    _check("glu", "gate", gate, activation)
    check_tensor("glu", "up", up, gate, (gate.dtype,))
    if up.shape != gate.shape:
        raise ValueError(
            f"glu: gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}; they must be equal, expand one of them"
        )
    y: torch.Tensor = _glu(gate, up, activation)
    return y


def glu_packed(x: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """`glu` of the two halves of ``x``, the gate first: ``(*batch, 2 * hidden)`` to contiguous ``(*batch, hidden)``.

    Its gradient is one contiguous tensor of ``x``'s shape, written in one launch. Raises as `glu` does, and
    `ValueError` where the last dimension is odd.
    """
    _check("glu_packed", "x", x, activation)
    if x.shape[-1] % 2:
        raise ValueError(f"glu_packed: the last dimension of x is {x.shape[-1]}; it holds two halves and must be even")
    y: torch.Tensor = _glu_packed(x, activation)
    return y


def _check(kernel: str, name: str, tensor: torch.Tensor, activation: str) -> None:
    if activation not in get_args(Activation):
        raise ValueError(f"{kernel}: activation is {activation!r}, known: {', '.join(get_args(Activation))}")
    check_tensor(kernel, name, tensor, tensor, FLOATS)
    if tensor.ndim == 0:
        raise ValueError(f"{kernel}: {name} has no dimension; give it at least one")
