"""Seeded dropout: the mask is drawn again in backward from the seed and each element's number, and never stored."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from reference_kernels._common import FLOATS, Rows, check_tensor, placed, row_offset
from reference_kernels._dropout import check_dropout, odds, philox, seeded_jit, survives

BLOCK = 4096


def config() -> int:
    """Warps for a block of ``BLOCK`` elements: 16 a thread, which four calls of Philox decide about."""
    return 8


@seeded_jit()
def _dropout_kernel(
    y_ptr: tl.tensor,
    x_ptr: tl.tensor,
    seed: tl.tensor,
    threshold: tl.tensor,
    scale: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``BLOCK`` elements, by their number in ``x`` as if it were contiguous. ``y`` is."""
    program = tl.program_id(0).to(tl.int64)
    call = program * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    first, second, third, fourth = philox(seed, call)
    # join() puts its two side by side in a last dimension: first, second, third, fourth once that is flat.
    words = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), [BLOCK])
    kept = survives(words, threshold)
    # Read by fours, as the words come: in vectors of more they would have to change threads.
    element = program * BLOCK + tl.max_contiguous(tl.arange(0, BLOCK), 4)
    inside = element < count
    if FLAT:
        x_at = element
    else:
        row = element // width
        x_at = row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2) + element % width * x_step
    x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + element, tl.where(kept, x * scale, 0.0), mask=inside)


@torch.library.custom_op("reference_kernels::dropout", mutates_args=())
def _dropout(x: torch.Tensor, seed: int, p: float) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    flat = x.is_contiguous()
    rows = Rows.of(x.view(-1) if flat else x)
    with placed(x.device):
        _dropout_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            y,
            *rows.tensors,
            seed,
            *odds(p),
            x.numel(),
            rows.width,
            *rows.layout,
            FLAT=flat,
            BLOCK=BLOCK,
            num_warps=config(),
        )
    return y


@_dropout.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 -- passed by name
    _, ctx.seed, ctx.p = inputs


def _differentiate(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return _dropout(dy, ctx.seed, ctx.p), None, None


_dropout.register_autograd(_differentiate, setup_context=_save)


def dropout(x: torch.Tensor, seed: int, p: float = 0.5) -> torch.Tensor:
    """``x / (1 - p)`` with a share of ``p`` of the elements set to 0; contiguous, of ``x``'s shape and dtype.

    ``x`` has any shape and strides, in float32, float16 or bfloat16; ``seed`` is from 0 to 2**63 - 1. Which elements
    are kept depends on the seed and on each element's number in the tensor, not on dtype, strides, device or tile.
    Computed in float32, rounded once: see `dropout_reference`. Differentiable as often as one likes: the gradient is
    the same dropout. Raises `TypeError` for other dtypes or a seed that is no whole number; `ValueError` for a seed or
    ``p`` out of range.
    """
    check_tensor("dropout", "x", x, x, FLOATS)
    check_dropout("dropout", seed, p)
    y: torch.Tensor = _dropout(x, seed, float(p))
    return y
