"""Tutorial 05: layer norm; the weight's gradients are gathered under a spin lock, then summed by a second kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tutorials.common import assert_rounded, each_float, normal

triton = pytest.importorskip("triton")
tl = triton.language
EPS = 1e-5


@triton.jit
def layer_norm_fwd(X, Y, W, B, Mean, Rstd, stride, N, eps, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0)
    Y += row * stride
    X += row * stride
    _mean = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        _mean += tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
    mean = tl.sum(_mean, axis=0) / N
    _var = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        x = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
        x = tl.where(cols < N, x - mean, 0.0)
        _var += x * x
    rstd = 1 / tl.sqrt(tl.sum(_var, axis=0) / N + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        mask = cols < N
        w = tl.load(W + cols, mask=mask)
        b = tl.load(B + cols, mask=mask)
        x = tl.load(X + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(Y + cols, (x - mean) * rstd * w + b, mask=mask)


@triton.jit
def layer_norm_bwd_dx(
    DX, DY, DW, DB, X, W, Mean, Rstd, Lock, stride, N, GROUP_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr
):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE_N)
    mask = cols < N
    X += row * stride
    DY += row * stride
    DX += row * stride
    lock_id = row % GROUP_SIZE_M
    Lock += lock_id
    Count = Lock + GROUP_SIZE_M
    DW = DW + lock_id * N + cols
    DB = DB + lock_id * N + cols
    x = tl.load(X + cols, mask=mask, other=0).to(tl.float32)
    dy = tl.load(DY + cols, mask=mask, other=0).to(tl.float32)
    w = tl.load(W + cols, mask=mask).to(tl.float32)
    mean = tl.load(Mean + row)
    rstd = tl.load(Rstd + row)
    xhat = tl.where(mask, (x - mean) * rstd, 0.0)
    wdy = tl.where(mask, w * dy, 0.0)
    c1 = tl.sum(xhat * wdy, axis=0) / N
    c2 = tl.sum(wdy, axis=0) / N
    tl.store(DX + cols, (wdy - (xhat * c1 + c2)) * rstd, mask=mask)
    partial_dw = (dy * xhat).to(w.dtype)
    partial_db = dy.to(w.dtype)
    while tl.atomic_cas(Lock, 0, 1) == 1:
        pass
    count = tl.load(Count)
    # The first one to come stores without loading: the buffers may hold anything before.
    if count == 0:
        tl.atomic_xchg(Count, 1)
    else:
        partial_dw += tl.load(DW, mask=mask)
        partial_db += tl.load(DB, mask=mask)
    tl.store(DW, partial_dw, mask=mask)
    tl.store(DB, partial_db, mask=mask)
    # Every thread has stored before one of them gives the lock back.
    tl.debug_barrier()
    tl.atomic_xchg(Lock, 0)


@triton.jit
def layer_norm_bwd_dwdb(DW, DB, FINAL_DW, FINAL_DB, M, N, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr):
    pid = tl.program_id(0)
    cols = pid * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    dw = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    db = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for i in range(0, M, BLOCK_SIZE_M):
        rows = i + tl.arange(0, BLOCK_SIZE_M)
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        offs = rows[:, None] * N + cols[None, :]
        dw += tl.load(DW + offs, mask=mask, other=0.0)
        db += tl.load(DB + offs, mask=mask, other=0.0)
    tl.store(FINAL_DW + cols, tl.sum(dw, axis=0), mask=cols < N)
    tl.store(FINAL_DB + cols, tl.sum(db, axis=0), mask=cols < N)


def forward(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    M, N = x.shape
    y = torch.empty_like(x)
    mean, rstd = torch.empty(M), torch.empty(M)
    layer_norm_fwd[(M,)](x, y, w, b, mean, rstd, x.stride(0), N, EPS, BLOCK_SIZE=32, num_warps=1, num_ctas=1)
    return y, mean, rstd


def backward(dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, groups: int) -> tuple[Tensor, ...]:
    M, N = x.shape
    locks = torch.zeros(2 * groups, dtype=torch.int32)
    partial_dw, partial_db = torch.empty(2, groups, N, dtype=x.dtype)
    dx, dw, db = torch.empty_like(dy), torch.empty_like(w), torch.empty_like(w)
    layer_norm_bwd_dx[(M,)](
        dx,
        dy,
        partial_dw,
        partial_db,
        x,
        w,
        mean,
        rstd,
        locks,
        x.stride(0),
        N,
        GROUP_SIZE_M=groups,
        BLOCK_SIZE_N=triton.next_power_of_2(N),
    )
    layer_norm_bwd_dwdb[lambda meta: (triton.cdiv(N, meta["BLOCK_SIZE_N"]),)](
        partial_dw, partial_db, dw, db, min(groups, M), N, BLOCK_SIZE_M=4, BLOCK_SIZE_N=32
    )
    return dx, dw, db


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, groups: int) -> Tensor:
        y, mean, rstd = forward(x, w, b)
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.groups = groups
        return y

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        return (*backward(dys[0], *ctx.saved_tensors, ctx.groups), None)


@pytest.mark.parametrize(("rows", "groups"), [(7, 3), (2, 8)], ids=["shared", "one row each"])
@each_float
def test_layer_norm(dtype: torch.dtype, rows: int, groups: int) -> None:
    """Forward and backward as torch in float64, whether programs share a lock or some locks have no program.

    The sums over 75 columns are trees or chains of three, so a dozen roundings each, and there are three of them on the
    way to a gradient of x. A partial gradient is rounded to the dtype with every row added to it.
    """
    n = 75
    x, dy = 2 * normal(rows, n, dtype=dtype) + 1, normal(rows, n, dtype=dtype, seed=1)
    w, b = normal(2, n, dtype=dtype, seed=2)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y = LayerNorm.apply(*leaves, groups)
    y.backward(dy)
    x, w, b, dy = (t.double().requires_grad_() for t in (x, w, b, dy))
    exact = torch.nn.functional.layer_norm(x, (n,), w, b, EPS)
    exact.backward(dy)
    with torch.no_grad():
        rstd = torch.rsqrt(x.var(1, correction=0, keepdim=True) + EPS)
        # The mean's own error enters each difference from it.
        xhat = (x.abs() + x.abs().mean(1, keepdim=True)) * rstd
        wdy = (w * dy).abs()
        assert_rounded(y.detach(), exact, roundings=32, scale=xhat * w.abs() + b.abs())
        scale = rstd * (wdy + xhat * (xhat * wdy).mean(1, keepdim=True) + wdy.mean(1, keepdim=True))
        # The last rounding of each of the two stages, and one for each row of the fullest group.
        stages = 1 + -(-rows // groups)
        for leaf, wide, size, roundings, narrow in (
            (leaves[0], x, scale, 64, 0),
            (leaves[1], w, (xhat * dy.abs()).sum(0), 64, stages),
            (leaves[2], b, dy.abs().sum(0), 16, stages),
        ):
            assert leaf.grad is not None
            assert leaf.grad.dtype == dtype
            assert wide.grad is not None
            assert_rounded(leaf.grad, wide.grad, roundings=roundings, scale=size, narrow=narrow)
