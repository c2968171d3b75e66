"""Fused linear layer: tiled matrix product on tensor cores, bias and activation before the one store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import triton
import triton.language as tl

from reference_kernels._activations import activated
from reference_kernels._common import FLOATS, INTERPRETED, Rows, check_tensor, jit, placed, row_offset

Activation = Literal["relu", "gelu", "silu"]


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """Tile sizes (elements; powers of two, at least 16, which is what ``tl.dot`` takes), warps, pipeline stages, and
    how many row blocks share a column block of the weight while it is in L2."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8


def config(rows: int, columns: int, depth: int, dtype: torch.dtype, *, interpreted: bool = INTERPRETED) -> MatmulTile:
    """Tile for a ``rows x columns`` result that sums ``depth`` products of ``dtype``.

    128 x 256 x 64 gives wgmma its full width, in 196608 of 232448 bytes of shared memory on sm_90; few rows (decoding)
    stream the weight through narrow tiles instead. On an H200 that was 602 of cuBLAS's 657 TFLOP/s at 8192**3 (128 x
    128: 466), 585 of 617 at 1024 x 4096 x 4096. float32 runs on the ordinary cores, where registers bound the tile.
    Interpreted, a step costs some 0.5 ms whatever its depth, so long sums take deep ones.
    """
    if interpreted:
        return MatmulTile(32, 32, 32 if depth <= 512 else 512, warps=4, stages=1)
    if dtype == torch.float32:
        return MatmulTile(32 if rows <= 32 else 64, 64, 32, warps=4, stages=3)
    if rows <= 64:
        return MatmulTile(max(16, triton.next_power_of_2(rows)), 32, 128, warps=4, stages=4)
    if rows * columns < 96 * 128 * 256:  # large tiles for less than three quarters of an H200's 132 multiprocessors
        return MatmulTile(64, 128, 64, warps=4, stages=4)
    return MatmulTile(128, 256, 64, warps=8, stages=4)


@jit
def _linear_kernel(
    y_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    weight_stride_n: tl.tensor,
    weight_stride_k: tl.tensor,
    bias_step: tl.tensor,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """One ``BLOCK_M x BLOCK_N`` tile of ``y``, contiguous ``(M, N)``; the other operands have strides of their own."""
    program = tl.program_id(0)
    blocks_m = tl.cdiv(M, BLOCK_M)
    blocks_n = tl.cdiv(N, BLOCK_N)
    first_m = program // (GROUP * blocks_n) * GROUP
    height = min(blocks_m - first_m, GROUP)
    within = program % (GROUP * blocks_n)
    m = (first_m + within % height).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (within // height).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)

    x_ptrs = x_ptr + row_offset(m, size1, size2, x_stride0, x_stride1, x_stride2)[:, None] + (k * x_step)[None, :]
    weight_ptrs = weight_ptr + (k * weight_stride_k)[:, None] + (n * weight_stride_n)[None, :]
    m_inside = (m < M)[:, None]
    n_inside = (n < N)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        # Both operands are masked along K: a zero in one alone does not silence a NaN beyond the end of the other.
        k_inside = k < K - start
        x = tl.load(x_ptrs, mask=m_inside & k_inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs, mask=k_inside[:, None] & n_inside, other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
        x_ptrs += BLOCK_K * x_step
        weight_ptrs += BLOCK_K * weight_stride_k
    if HAS_BIAS:
        total += tl.load(bias_ptr + n * bias_step, mask=n < N, other=0.0).to(tl.float32)[None, :]
    total = activated(total, ACTIVATION)
    tl.store(y_ptr + m[:, None] * N + n[None, :], total, mask=m_inside & n_inside)


@torch.library.custom_op("reference_kernels::linear", mutates_args=())
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    N, K = weight.shape
    y = torch.empty((*x.shape[:-1], N), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    rows = Rows.of(x)
    tile = config(rows.count, N, K, x.dtype)
    with placed(x.device):
        _linear_kernel[(triton.cdiv(rows.count, tile.m) * triton.cdiv(N, tile.n),)](
            y,
            *rows.tensors,
            weight,
            x if bias is None else bias,
            rows.count,
            N,
            K,
            *rows.sizes[1:],
            *rows.strides[0],
            *weight.stride(),
            1 if bias is None else bias.stride(0),
            HAS_BIAS=bias is not None,
            ACTIVATION=activation,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            GROUP=tile.group,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return y


@_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """``activation(x @ weight.T + bias)``: ``(*batch, k)`` by ``(n, k)`` to contiguous ``(*batch, n)``.

    All operands share one dtype (float32, float16 or bfloat16) and may have any strides. Sums in float32 without TF32
    and rounds once, see `linear_reference`. Raises `TypeError` for other or mixed dtypes; `ValueError` for shapes that
    do not fit, an unknown activation, or mixed devices.
    """
    if activation is not None and activation not in get_args(Activation):
        raise ValueError(f"linear: activation is {activation!r}, known: None, {', '.join(get_args(Activation))}")
    check_tensor("linear", "x", x, x, FLOATS)
    check_tensor("linear", "weight", weight, x, (x.dtype,))
    if x.ndim == 0 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"linear: x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit; "
            "x is (*batch, k) and weight (n, k), as in torch.nn.Linear"
        )
    if bias is not None:
        check_tensor("linear", "bias", bias, x, (x.dtype,))
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"linear: bias has shape {tuple(bias.shape)}, weight asks for ({weight.shape[0]},)")
    y: torch.Tensor = _linear(x, weight, bias, activation)
    return y
