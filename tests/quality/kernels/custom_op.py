# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Custom ops around a Triton kernel, with what ``torch.compile`` is told about them.

Scales: ``x`` ``(batch, rows, cols)`` gives the float32 absolute maxima ``(batch, rows)``, which lie rows first in
memory, as matrix units want them. Bias: ``x`` ``(rows, cols)`` gets ``bias`` ``(cols,)`` added in place. Square:
``x * x``, whose autograd formula calls a second operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor
from pytest_fusion.spec.fusion_spec import KEYWORDS

FAKES = ("fake-contiguous", "fake-dtype", "fake-shape")


def reference(x: Tensor) -> Tensor:
    return x.float().abs().amax(-1).transpose(0, 1).contiguous().transpose(0, 1)


@triton.jit
def scale_kernel(
    x, out, rows, cols, x_batch, x_row, x_col, out_batch, out_row, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    sample = (tl.program_id(0) // rows).to(tl.int64)
    row = (tl.program_id(0) % rows).to(tl.int64)
    largest = tl.zeros([], tl.float32)
    bad = tl.zeros([], tl.int32)
    end = cols
    if WIDTH > 0:
        end = WIDTH
    for start in range(0, end, BLOCK):
        c = start + tl.arange(0, BLOCK)
        value = tl.load(x + sample * x_batch + row * x_row + c * x_col, mask=c < end, other=0.0).to(tl.float32)
        bad = tl.maximum(bad, tl.max((value != value).to(tl.int32), axis=0))
        largest = tl.maximum(largest, tl.max(tl.where(value != value, 0.0, tl.abs(value)), axis=0))
    tl.store(out + sample * out_batch + row * out_row, tl.where(bad > 0, float("nan"), largest))


def _scales(x: Tensor, *, per_width: bool = False) -> Tensor:
    batch, rows, cols = x.shape
    out = torch.empty((rows, batch), dtype=torch.float32, device=x.device).T
    if out.numel():
        scale_kernel[(batch * rows,)](
            x, out, rows, cols, *x.stride(), *out.stride(), BLOCK=64, WIDTH=cols if per_width else 0
        )
    return out


@triton.jit
def bias_kernel(x, bias, cols, x_row, x_col, bias_pitch, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    at = x + row * x_row + c * x_col
    value = tl.load(at, mask=c < cols, other=0.0).to(tl.float32)
    value += tl.load(bias + c * bias_pitch, mask=c < cols, other=0.0).to(tl.float32)
    tl.store(at, value.to(x.dtype.element_ty), mask=c < cols)


def _register(bug: str) -> Callable[[Tensor], Tensor]:
    name = f"fusion_quality::scales_{bug.replace('-', '_') or 'right'}"

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        return _scales(x)

    @op.register_fake
    def _(x: Tensor) -> Tensor:
        batch, rows, _ = x.shape
        if bug == "fake-contiguous":
            return x.new_empty((batch, rows), dtype=torch.float32)
        if bug == "fake-dtype":
            return x.new_empty((rows, batch)).T
        if bug == "fake-shape":
            return x.new_empty((rows, batch), dtype=torch.float32)
        return x.new_empty((rows, batch), dtype=torch.float32).T

    return op


def _register_bias(bug: str) -> Callable[[Tensor, Tensor], None]:
    name = f"fusion_quality::bias_{bug.replace('-', '_') or 'right'}"
    told: Any = () if bug == "mutation-not-declared" else ("x",)

    @torch.library.custom_op(name, mutates_args=told)
    def op(x: Tensor, bias: Tensor) -> None:
        if x.numel():
            bias_kernel[(x.shape[0],)](
                x, bias, x.shape[1], *x.stride(), bias.stride(0), BLOCK=triton.next_power_of_2(x.shape[1])
            )

    op.register_fake(lambda x, bias: None)
    return op


@triton.jit
def product_kernel(a, b, out, cols, a_row, a_col, b_row, b_col, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    left = tl.load(a + row * a_row + c * a_col, mask=c < cols, other=0.0).to(tl.float32)
    right = tl.load(b + row * b_row + c * b_col, mask=c < cols, other=0.0).to(tl.float32)
    tl.store(out + row * cols + c, (FACTOR * left * right).to(out.dtype.element_ty), mask=c < cols)


def _product(a: Tensor, b: Tensor, factor: int) -> Tensor:
    rows, cols = a.shape
    out = torch.empty((rows, cols), dtype=a.dtype, device=a.device)
    if out.numel():
        block = triton.next_power_of_2(cols)
        product_kernel[(rows,)](a, b, out, cols, *a.stride(), *b.stride(), FACTOR=factor, BLOCK=block)
    return out


def _register_square(bug: str) -> Callable[[Tensor], Tensor]:
    name = f"fusion_quality::square_{bug.replace('-', '_') or 'right'}"

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        return _product(x, x, 1)

    @torch.library.custom_op(f"{name}_backward", mutates_args=())
    def backward(gradient: Tensor, x: Tensor) -> Tensor:
        return _product(gradient, x, 2)

    @backward.register_fake
    def _(gradient: Tensor, x: Tensor) -> Tensor:
        if bug == "backward-fake-follows-upstream":
            return torch.empty_like(gradient)
        return x.new_empty(x.shape, dtype=torch.float32 if bug == "backward-fake-dtype" else x.dtype)

    op.register_fake(lambda x: x.new_empty(x.shape))
    op.register_autograd(
        lambda ctx, gradient: backward(gradient, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return op


OPS = {bug: _register(bug) for bug in ("", *FAKES)}
BIAS_OPS = {bug: _register_bias(bug) for bug in ("", "mutation-not-declared")}

SQUARE_OPS = {bug: _register_square(bug) for bug in ("", "backward-fake-follows-upstream", "backward-fake-dtype")}


def bias_reference(x: Tensor, bias: Tensor) -> None:
    x.copy_((x.float() + bias.float()).to(x.dtype))


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor) -> Tensor:
        return OPS[bug](x)

    return FusionSpec(
        name=f"custom_op {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"x": tensor("batch rows cols")},
        dims={"batch": dim(0, 4), "rows": dim(0, 8), "cols": dim(1, 128)},
        compile=True,
    )


def make_bias_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor, bias: Tensor) -> None:
        BIAS_OPS[bug](x, bias)

    written = tensor("rows cols", layouts=("contiguous", "padded", "transposed", "step", "offset"))
    return FusionSpec(
        name=f"custom_bias {bug}".strip(),
        fused=fused,
        reference=bias_reference,
        inputs={"x": written, "bias": tensor("cols")},
        dims={"rows": dim(0, 8), "cols": dim(0, 128)},
        mutates="x",
        compile=True,
    )


def make_square_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor) -> Tensor:
        return SQUARE_OPS[bug](x)

    return FusionSpec(
        name=f"square {bug}".strip(),
        fused=fused,
        reference=lambda x: x * x,
        inputs={"x": tensor("rows cols")},
        dims={"rows": dim(0, 8), "cols": dim(0, 128)},
        grad=True,
        compile=True,
    )


def make_sized_spec(bug: str = "") -> FusionSpec:
    """A size that is a constant of the kernel is compiled again for each of its values."""

    def fused(x: Tensor) -> Tensor:
        return _scales(x, per_width=bug == "width-is-constant")

    bound = {"max_recompiles": 4} if "max_recompiles" in KEYWORDS else {}
    return FusionSpec(
        name=f"sized {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"x": tensor("batch rows cols")},
        dims={"batch": dim(0, 4), "rows": dim(0, 8), "cols": dim(1, 128)},
        compile=True,
        **bound,
    )
