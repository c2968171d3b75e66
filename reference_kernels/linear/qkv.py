"""Fused projections: queries, keys and values of one input in one launch, whose programs share out all three."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from reference_kernels._common import Rows, check_tensor, jit, placed, row_offset
from reference_kernels.linear.backward import as_matrix, bias_gradient, input_gradient, weight_gradient
from reference_kernels.linear.descriptors import alike, block_of, by_rows, finish_linear, launched, matrix_of, result_of
from reference_kernels.linear.products import MatmulTile, by_pointers, check_operands, config, grouped, product, wide


@jit
def _chosen(
    block: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
) -> tl.tensor:
    """What belongs to ``block`` of ``queries``, then ``keys``, then the rest, which are values.

    Selected and not branched for: strides of 1 stay known to be 1, pointers to be aligned, and there is one loop, where
    three would take three times the shared memory.
    """
    return tl.where(block < queries, query, tl.where(block < queries + keys, key, value))


@jit
def _qkv_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    x_ptr: tl.tensor,
    query_weight_ptr: tl.tensor,
    key_weight_ptr: tl.tensor,
    value_weight_ptr: tl.tensor,
    query_bias_ptr: tl.tensor,
    key_bias_ptr: tl.tensor,
    value_bias_ptr: tl.tensor,
    M: tl.tensor,
    query_N: tl.tensor,
    key_N: tl.tensor,
    value_N: tl.tensor,
    K: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    query_stride_n: tl.tensor,
    query_stride_k: tl.tensor,
    key_stride_n: tl.tensor,
    key_stride_k: tl.tensor,
    value_stride_n: tl.tensor,
    value_stride_k: tl.tensor,
    query_bias_step: tl.tensor,
    key_bias_step: tl.tensor,
    value_bias_step: tl.tensor,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """One tile of one of the three results, each contiguous ``(M, N)``: their blocks of columns are side by side."""
    query_blocks = tl.cdiv(query_N, BLOCK_N)
    key_blocks = tl.cdiv(key_N, BLOCK_N)
    blocks = query_blocks + key_blocks + tl.cdiv(value_N, BLOCK_N)
    block_m, block_n = grouped(tl.program_id(0), tl.cdiv(M, BLOCK_M), blocks, GROUP)
    y_ptr = _chosen(block_n, query_blocks, key_blocks, query_ptr, key_ptr, value_ptr)
    weight_ptr = _chosen(block_n, query_blocks, key_blocks, query_weight_ptr, key_weight_ptr, value_weight_ptr)
    bias_ptr = _chosen(block_n, query_blocks, key_blocks, query_bias_ptr, key_bias_ptr, value_bias_ptr)
    N = _chosen(block_n, query_blocks, key_blocks, query_N, key_N, value_N)
    stride_n = _chosen(block_n, query_blocks, key_blocks, query_stride_n, key_stride_n, value_stride_n)
    stride_k = _chosen(block_n, query_blocks, key_blocks, query_stride_k, key_stride_k, value_stride_k)
    bias_step = _chosen(block_n, query_blocks, key_blocks, query_bias_step, key_bias_step, value_bias_step)
    block_n -= _chosen(block_n, query_blocks, key_blocks, 0, query_blocks, query_blocks + key_blocks)

    m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x_ptr + row_offset(m, size1, size2, x_stride0, x_stride1, x_stride2)
    m_inside = (m < M)[:, None]
    n_inside = (n < N)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = product(total, x_rows, weight_ptr, n, m_inside, n_inside, K, x_step, stride_n, stride_k, BLOCK_K)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n * bias_step, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + m[:, None] * N + n[None, :], total, mask=m_inside & n_inside)


@jit
def _qkv_tiles_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    x: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    value_weight: tl.tensor,
    query_bias_ptr: tl.tensor,
    key_bias_ptr: tl.tensor,
    value_bias_ptr: tl.tensor,
    query_bias_step: tl.tensor,
    key_bias_step: tl.tensor,
    value_bias_step: tl.tensor,
    M: tl.tensor,
    query_N: tl.tensor,
    key_N: tl.tensor,
    value_N: tl.tensor,
    K: tl.tensor,
    programs: tl.tensor,
    X_TURNED: tl.constexpr,
    QUERY_WEIGHT_TURNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Every ``programs``-th tile of all three results, in the order of `_qkv_kernel`; the weights are all turned or
    none. A tile and a step choose between descriptors."""
    query_blocks = tl.cdiv(query_N, BLOCK_N)
    key_blocks = tl.cdiv(key_N, BLOCK_N)
    blocks_m, blocks = tl.cdiv(M, BLOCK_M), query_blocks + key_blocks + tl.cdiv(value_N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), blocks_m * blocks, programs, flatten=True):
        block_m, block = grouped(tile, blocks_m, blocks, GROUP)
        m = block_m * BLOCK_M
        n = (block - _chosen(block, query_blocks, key_blocks, 0, query_blocks, query_blocks + key_blocks)) * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            weight = query_weight
            if block >= query_blocks:
                weight = key_weight
            if block >= query_blocks + key_blocks:
                weight = value_weight
            rows = block_of(x, m, k, X_TURNED)
            total = tl.dot(rows, tl.trans(block_of(weight, n, k, QUERY_WEIGHT_TURNED)), total)
        y = query
        if block >= query_blocks:
            y = key
        if block >= query_blocks + key_blocks:
            y = value
        bias_ptr = _chosen(block, query_blocks, key_blocks, query_bias_ptr, key_bias_ptr, value_bias_ptr)
        bias_step = _chosen(block, query_blocks, key_blocks, query_bias_step, key_bias_step, value_bias_step)
        N = _chosen(block, query_blocks, key_blocks, query_N, key_N, value_N)
        finish_linear(total, y, bias_ptr, bias_step, N, m, n, HAS_BIAS, None, PARTS)


_NAMES = "query", "key", "value"


def _by_tiles(
    results: Sequence[torch.Tensor],
    rows: Rows,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    tile: MatmulTile,
) -> bool:
    """Fill the contiguous ``results``, where the layouts have descriptors, weights all turned or none: whether they
    have."""
    widths = [len(weight) for weight in weights]
    found = [matrix_of(weight, (tile.n, tile.k)) for weight in weights]
    operands = {"x": by_rows(rows, tile), **alike([f"{name}_weight" for name in _NAMES], found)}
    for name, y, width in zip(_NAMES, results, widths, strict=True):
        operands[name] = result_of(y, rows.count, width, tile)
    given = {f"{name}_bias": y if bias is None else bias for name, y, bias in zip(_NAMES, results, biases, strict=True)}
    return launched(
        _qkv_tiles_kernel,
        operands,
        {"M": rows.count, **{f"{name}_N": width for name, width in zip(_NAMES, widths, strict=True)}, "K": rows.width},
        tile,
        results[0].device,
        **{f"{name}_ptr": bias for name, bias in given.items()},
        **{f"{name}_step": bias.stride(-1) for name, bias in given.items()},
        HAS_BIAS=biases[0] is not None,
    )


@torch.library.custom_op("reference_kernels::qkv_linear", mutates_args=())
def _qkv_linear(
    x: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    value_weight: torch.Tensor,
    query_bias: torch.Tensor | None,
    key_bias: torch.Tensor | None,
    value_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights, biases = (query_weight, key_weight, value_weight), (query_bias, key_bias, value_bias)
    results = _results(x, *weights)
    widths = [weight.shape[0] for weight in weights]
    rows = Rows.of(x)
    if rows.count == 0 or not any(widths):
        return results
    tile = wide(config(rows.count, sum(widths), x.shape[-1], x.dtype))
    if tile.resident and _by_tiles(results, rows, weights, biases, tile):
        return results
    tile = by_pointers(tile)
    blocks = sum(triton.cdiv(width, tile.n) for width in widths)
    with placed(x.device):
        _qkv_kernel[(triton.cdiv(rows.count, tile.m) * blocks,)](
            *results,
            *rows.tensors,
            *weights,
            *(x if bias is None else bias for bias in biases),
            rows.count,
            *widths,
            x.shape[-1],
            *rows.layout,
            *(stride for weight in weights for stride in weight.stride()),
            *(1 if bias is None else bias.stride(0) for bias in biases),
            HAS_BIAS=query_bias is not None,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            GROUP=tile.group,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return results


def _results(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (
        torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device) for weight in weights
    )
    return query, key, value


@_qkv_linear.register_fake
def _(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _results(x, *(weight for weight in others[:3] if weight is not None))


def _save(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:  # noqa: ARG001 -- passed by name
    ctx.save_for_backward(*inputs[:4])


def _differentiate(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    of_x, *wanted = ctx.needs_input_grad
    upstreams = [as_matrix(d) for d in upstream]
    dx = input_gradient(x, upstreams, weights) if of_x else None
    rows = as_matrix(x)
    dweights = [weight_gradient(d, rows) if needed else None for d, needed in zip(upstreams, wanted[:3], strict=True)]
    dbiases = [bias_gradient(d) if needed else None for d, needed in zip(upstreams, wanted[3:], strict=True)]
    return dx, *dweights, *dbiases


_qkv_linear.register_autograd(_differentiate, setup_context=_save)


def qkv_linear(
    x: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    value_weight: torch.Tensor,
    query_bias: torch.Tensor | None = None,
    key_bias: torch.Tensor | None = None,
    value_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``x @ weight.T + bias`` for queries, keys and values: ``(*batch, k)`` by three ``(n, k)`` of any widths, which
    stay three tensors, to three contiguous ``(*batch, n)``.

    All operands share one dtype (float32, float16 or bfloat16) and may have any strides; there are three biases or
    none. Sums in float32 without TF32 and rounds once: see `qkv_linear_reference`. Differentiable once by all of them.
    Raises `TypeError` for other or mixed dtypes; `ValueError` for shapes that do not fit, one or two biases, or mixed
    devices.
    """
    weights = {"query_weight": query_weight, "key_weight": key_weight, "value_weight": value_weight}
    biases = {"query_bias": query_bias, "key_bias": key_bias, "value_bias": value_bias}
    check_operands("qkv_linear", x, weights)
    absent = [name for name, bias in biases.items() if bias is None]
    if 0 < len(absent) < 3:
        raise ValueError(f"qkv_linear: {', '.join(absent)} is None, others are not; give all three or none")
    for weight, (name, bias) in zip(weights.values(), biases.items(), strict=True):
        if bias is None:
            continue
        check_tensor("qkv_linear", name, bias, x, (x.dtype,))
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"qkv_linear: {name} has shape {tuple(bias.shape)}, its weight needs ({weight.shape[0]},)")
    query, key, value = _qkv_linear(x, *weights.values(), *biases.values())
    return query, key, value
