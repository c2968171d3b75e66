"""Kernels to time the CPU lane with: rows, tiles, and loops whose bounds differ between programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x, out, stride, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < cols
    value = tl.load(x + row * stride + i, mask=mask, other=-float("inf")).to(tl.float32)
    shifted = tl.exp(value - tl.max(value, 0))
    tl.store(out + row * stride + i, shifted / tl.sum(shifted, 0), mask=mask)


@triton.jit
def rms_norm_kernel(x, weight, out, stride, cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < cols
    value = tl.load(x + row * stride + i, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / cols + eps)
    tl.store(out + row * stride + i, value * scale * tl.load(weight + i, mask=mask, other=0.0), mask=mask)


@triton.jit
def layer_norm_kernel(x, weight, bias, out, stride, cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * stride + i, mask=i < cols, other=0.0)
    mean = tl.sum(total, 0) / cols
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        i = start + tl.arange(0, BLOCK)
        centred = tl.where(i < cols, tl.load(x + row * stride + i, mask=i < cols, other=0.0) - mean, 0.0)
        squares += centred * centred
    scale = 1 / tl.sqrt(tl.sum(squares, 0) / cols + eps)
    for start in range(0, cols, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask = i < cols
        value = (tl.load(x + row * stride + i, mask=mask, other=0.0) - mean) * scale
        value = value * tl.load(weight + i, mask=mask, other=0.0) + tl.load(bias + i, mask=mask, other=0.0)
        tl.store(out + row * stride + i, value, mask=mask)


@triton.jit
def matmul_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a + rows[:, None] * K + k[None, :], mask=(rows[:, None] < M) & (k[None, :] < K), other=0.0)
        right = tl.load(b + k[:, None] * N + cols[None, :], mask=(k[:, None] < K) & (cols[None, :] < N), other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(c + rows[:, None] * N + cols[None, :], total, mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def attention_kernel(q, k, v, out, length, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    block = tl.program_id(0)
    head = tl.program_id(1) * length * D
    rows, d = block * BM + tl.arange(0, BM), tl.arange(0, D)
    inside = rows[:, None] < length
    query = tl.load(q + head + rows[:, None] * D + d[None, :], mask=inside, other=0.0) * scale
    best = tl.full([BM], -float("inf"), tl.float32)
    norm = tl.zeros([BM], tl.float32)
    total = tl.zeros([BM, D], tl.float32)
    # Causal: a block of queries ends its loop at its own diagonal.
    for start in range(0, tl.minimum((block + 1) * BM, length), BN):
        cols = start + tl.arange(0, BN)
        there = cols[None, :] < length
        key = tl.load(k + head + d[:, None] + cols[None, :] * D, mask=there, other=0.0)
        score = tl.dot(query, key, input_precision="ieee")
        score = tl.where(there & (rows[:, None] >= cols[None, :]), score, -float("inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        shrink = tl.exp(best - higher)
        norm = norm * shrink + tl.sum(weight, 1)
        value = tl.load(v + head + cols[:, None] * D + d[None, :], mask=cols[:, None] < length, other=0.0)
        total = total * shrink[:, None] + tl.dot(weight, value, input_precision="ieee")
        best = higher
    tl.store(out + head + rows[:, None] * D + d[None, :], total / norm[:, None], mask=inside)


@dataclass(frozen=True, slots=True)
class Timed:
    """``launch()`` runs the kernel once, ``check()`` says whether the last result is right; ``bar`` is the goal."""

    name: str
    programs: int
    bar: float
    launch: Callable[[], None]
    check: Callable[[], None]


def timed() -> list[Timed]:
    """Every kernel at its sizes, inputs made."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows: list[Timed] = []
    for programs, cols in ((64, 1000), (256, 1000), (1024, 200)):
        x, w, b = rand(programs, cols), rand(cols), rand(cols)
        out = torch.empty_like(x)
        block = triton.next_power_of_2(cols)

        def softmax(x=x, out=out, grid=(programs,), cols=cols, block=block) -> None:
            softmax_kernel[grid](x, out, cols, cols, BLOCK=block)

        def softmax_right(x=x, out=out) -> None:
            torch.testing.assert_close(out, x.softmax(1))

        def rms_norm(x=x, w=w, out=out, grid=(programs,), cols=cols, block=block) -> None:
            rms_norm_kernel[grid](x, w, out, cols, cols, 1e-6, BLOCK=block)

        def rms_norm_right(x=x, w=w, out=out) -> None:
            torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, x.shape[1:], w, 1e-6))

        def layer_norm(x=x, w=w, b=b, out=out, grid=(programs,), cols=cols) -> None:
            layer_norm_kernel[grid](x, w, b, out, cols, cols, 1e-5, BLOCK=256)

        def layer_norm_right(x=x, w=w, b=b, out=out) -> None:
            torch.testing.assert_close(out, torch.nn.functional.layer_norm(x, x.shape[1:], w, b), atol=1e-5, rtol=1e-4)

        size = f"{programs} x {cols}"
        rows.append(Timed(f"softmax {size}", programs, 10, softmax, softmax_right))
        rows.append(Timed(f"rms_norm {size}", programs, 10, rms_norm, rms_norm_right))
        rows.append(Timed(f"layer_norm, loops, {size}", programs, 10, layer_norm, layer_norm_right))
    return [*rows, *_tiles(rand)]


def _tiles(rand: Callable[..., torch.Tensor]) -> list[Timed]:
    found: list[Timed] = []
    for m, n, k, bm, bn, bk in ((130, 90, 150, 32, 32, 32), (500, 500, 256, 64, 64, 32)):
        a, b, c = rand(m, k), rand(k, n), torch.empty(m, n)
        grid = (triton.cdiv(m, bm), triton.cdiv(n, bn))

        def matmul(a=a, b=b, c=c, grid=grid, m=m, n=n, k=k, bm=bm, bn=bn, bk=bk) -> None:
            matmul_kernel[grid](a, b, c, m, n, k, BM=bm, BN=bn, BK=bk)

        def matmul_right(a=a, b=b, c=c) -> None:
            torch.testing.assert_close(c, a @ b, atol=1e-4, rtol=1e-4)

        found.append(Timed(f"matmul {m} x {n} x {k}, tiles {bm} x {bn}", grid[0] * grid[1], 8, matmul, matmul_right))
    heads, length, d = 4, 500, 32
    q, k_, v = rand(heads, length, d), rand(heads, length, d), rand(heads, length, d)
    out = torch.empty_like(q)
    blocks = triton.cdiv(length, 32)

    def attention() -> None:
        attention_kernel[(blocks, heads)](q, k_, v, out, length, d**-0.5, D=d, BM=32, BN=32)

    def attention_right() -> None:
        exact = torch.nn.functional.scaled_dot_product_attention(q, k_, v, is_causal=True)
        torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-4)

    name = f"causal attention {heads} x {length} x {d}"
    return [*found, Timed(name, blocks * heads, 3, attention, attention_right)]
