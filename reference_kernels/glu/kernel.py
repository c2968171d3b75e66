"""Fused gated linear unit: activation and product in one launch, and both gradients in another."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import triton.language as tl

from reference_kernels._activations import activated, slope
from reference_kernels._common import FLOATS, check_tensor, jit, row_offset
from reference_kernels._elementwise import launch, place

Activation = Literal["silu", "gelu", "gelu_tanh"]


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
    row, column = place(column_blocks, FLAT, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < rows) & (column < width)
    gate_at = row_offset(row, size1, size2, gate_stride0, gate_stride1, gate_stride2) + column * gate_step
    up_at = row_offset(row, size1, size2, up_stride0, up_stride1, up_stride2) + column * up_step
    gate = tl.load(gate_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + up_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + column, activated(gate, ACTIVATION, y_ptr.dtype.element_ty) * up, mask=inside)


@jit
def _glu_backward_kernel(
    dgate_ptr: tl.tensor,
    dup_ptr: tl.tensor,
    y_ptr: tl.tensor,
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
    AGAIN: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One tile of both gradients, whose rows are ``d_stride`` elements apart: one half each, or two tensors. ``AGAIN``:
    and of the result, which is computed again, with rows as far apart."""
    row, column = place(column_blocks, FLAT, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < rows) & (column < width)
    dy_at = row_offset(row, size1, size2, dy_stride0, dy_stride1, dy_stride2) + column * dy_step
    gate_at = row_offset(row, size1, size2, gate_stride0, gate_stride1, gate_stride2) + column * gate_step
    up_at = row_offset(row, size1, size2, up_stride0, up_stride1, up_stride2) + column * up_step
    dy = tl.load(dy_ptr + dy_at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + up_at, mask=inside, other=0.0).to(tl.float32)
    d_at = row * d_stride + column
    DTYPE: tl.constexpr = dgate_ptr.dtype.element_ty
    active = activated(gate, ACTIVATION, DTYPE)
    tl.store(dgate_ptr + d_at, dy * up * slope(gate, ACTIVATION), mask=inside)
    tl.store(dup_ptr + d_at, dy * active, mask=inside)
    if AGAIN:
        tl.store(y_ptr + d_at, active * up, mask=inside)


def _forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel():
        launch(_glu_kernel, (y,), (gate, up), ACTIVATION=activation)
    return y


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
        inputs, constants = (dy, gate, up), {"ACTIVATION": activation, "AGAIN": False}
        launch(_glu_backward_kernel, (dgate, dup, dgate), inputs, gate.shape[-1], **constants)
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
        dgate, dup = dx.chunk(2, dim=-1)
        inputs, constants = (dy, *x.chunk(2, dim=-1)), {"ACTIVATION": activation, "AGAIN": False}
        launch(_glu_backward_kernel, (dgate, dup, dgate), inputs, x.shape[-1], **constants)
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
