"""The fused dot interaction of DLRM: products of all pairs of a sample's vectors beside its dense features."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from reference_kernels._common import FLOATS, INTERPRETED, check_tensor, jit, placed

# Four for each multiprocessor of an H200, as many as its registers hold. Interpreted, many are run at once.
PROGRAMS = 4096 if INTERPRETED else 528
MOST_VECTORS = 128  # a sample's products are one tile


def config(vectors: int, features: int, dtype: torch.dtype, *, interpreted: bool = INTERPRETED) -> tuple[int, int, int]:
    """Vectors and features of a tile, both powers of two of at least 16, and warps: one sample for each program.

    Half precision goes through the tensor cores, a sample of 128 features at once; float32 multiplies on the ordinary
    cores, where fewer features keep both operands in registers, as they do for more than 64 vectors. With a warp for
    each 8 vectors nothing spills (cuobjdump, sm_90)."""
    padded = max(16, triton.next_power_of_2(vectors))
    most = (128 if padded <= 64 else 32) if dtype.itemsize == 2 else 32
    if interpreted:  # small, so that small cases take several, but each operation costs some 20 us
        most = 16 if features <= 64 else 1024
    return padded, min(most, max(16, triton.next_power_of_2(features))), padded // 8


@jit
def _vectors(
    dense_ptr: tl.tensor,
    sparse_ptr: tl.tensor,
    sample: tl.tensor,
    vector: tl.tensor,
    column: tl.tensor,
    vectors: tl.tensor,
    features: tl.tensor,
    dense_sample: tl.tensor,
    dense_step: tl.tensor,
    sparse_sample: tl.tensor,
    sparse_vector: tl.tensor,
    sparse_step: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """The dense row of a sample, and all of its vectors, the dense one first; 0 outside."""
    inside = column < features
    dense = tl.load(dense_ptr + sample * dense_sample + column * dense_step, mask=inside, other=0.0)
    at = ((vector - 1) * sparse_vector)[:, None] + (column * sparse_step)[None, :]
    wanted = ((vector > 0) & (vector < vectors))[:, None] & inside[None, :]
    sparse = tl.load(sparse_ptr + sample * sparse_sample + at, mask=wanted, other=0.0)
    return dense, tl.where((vector == 0)[:, None], dense[None, :], sparse)


@jit
def _interaction_kernel(
    out_ptr: tl.tensor,
    dense_ptr: tl.tensor,
    sparse_ptr: tl.tensor,
    batch: tl.tensor,
    vectors: tl.tensor,
    features: tl.tensor,
    width: tl.tensor,
    dense_sample: tl.tensor,
    dense_step: tl.tensor,
    sparse_sample: tl.tensor,
    sparse_vector: tl.tensor,
    sparse_step: tl.tensor,
    WHOLE: tl.constexpr,
    BLOCK_VECTORS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
) -> None:
    """One sample's row of ``out``, contiguous ``(batch, width)``; or ``WHOLE``, all features being one tile, every
    ``num_programs``-th row, and the next sample is read before this one's products are taken, which hides that time."""
    sample = tl.program_id(0).to(tl.int64)
    vector = tl.arange(0, BLOCK_VECTORS).to(tl.int64)
    column = tl.arange(0, BLOCK_FEATURES).to(tl.int64)
    number = tl.arange(0, BLOCK_VECTORS)  # 32 bits: the numbers of all pairs at once are what takes most registers
    upper, lower = number[:, None], number[None, :]
    pair = upper * (upper - 1) // 2 + lower
    chosen = (lower < upper) & (upper < vectors)
    if WHOLE:
        dense, own = _vectors(
            dense_ptr, sparse_ptr, sample, vector, column, vectors, features, dense_sample, dense_step, sparse_sample,
            sparse_vector, sparse_step,
        )  # fmt: skip
        for row in range(tl.program_id(0), batch, tl.num_programs(0)):
            sample = tl.full([], row, tl.int64)
            out_row = out_ptr + sample * width
            later = tl.minimum(sample + tl.num_programs(0), batch - 1)
            next_dense, next_own = _vectors(
                dense_ptr, sparse_ptr, later, vector, column, vectors, features, dense_sample, dense_step,
                sparse_sample, sparse_vector, sparse_step,
            )  # fmt: skip
            tl.store(out_row + column, dense, mask=column < features)
            products = tl.dot(own, tl.trans(own), input_precision="ieee")
            dense, own = next_dense, next_own
            tl.store(out_row + features + pair, products, mask=chosen)
    else:
        products = tl.zeros([BLOCK_VECTORS, BLOCK_VECTORS], tl.float32)
        for first in range(0, features, BLOCK_FEATURES):
            dense, own = _vectors(
                dense_ptr, sparse_ptr, sample, vector, first + column, vectors, features, dense_sample, dense_step,
                sparse_sample, sparse_vector, sparse_step,
            )  # fmt: skip
            tl.store(out_ptr + sample * width + first + column, dense, mask=first + column < features)
            products = tl.dot(own, tl.trans(own), products, input_precision="ieee")
        tl.store(out_ptr + sample * width + features + pair, products, mask=chosen)


@jit
def _interaction_backward_kernel(
    ddense_ptr: tl.tensor,
    dsparse_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    dense_ptr: tl.tensor,
    sparse_ptr: tl.tensor,
    vectors: tl.tensor,
    features: tl.tensor,
    dout_sample: tl.tensor,
    dout_step: tl.tensor,
    dense_sample: tl.tensor,
    dense_step: tl.tensor,
    sparse_sample: tl.tensor,
    sparse_vector: tl.tensor,
    sparse_step: tl.tensor,
    BLOCK_VECTORS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
) -> None:
    """One sample of both gradients, contiguous. A vector's gradient is the sum of the others, each times the gradient
    of the pair: a product with a symmetric matrix whose elements are those of ``dout`` as they stand."""
    sample = tl.program_id(0).to(tl.int64)
    vector = tl.arange(0, BLOCK_VECTORS).to(tl.int64)
    dout_row = dout_ptr + sample * dout_sample
    number = tl.arange(0, BLOCK_VECTORS)
    upper = tl.maximum(number[:, None], number[None, :])
    lower = tl.minimum(number[:, None], number[None, :])
    pair = features + upper * (upper - 1) // 2 + lower
    slopes = tl.load(dout_row + pair.to(tl.int64) * dout_step, mask=(lower < upper) & (upper < vectors), other=0.0)
    for first in range(0, features, BLOCK_FEATURES):
        column = first + tl.arange(0, BLOCK_FEATURES).to(tl.int64)
        inside = column < features
        _, own = _vectors(
            dense_ptr, sparse_ptr, sample, vector, column, vectors, features, dense_sample, dense_step, sparse_sample,
            sparse_vector, sparse_step,
        )  # fmt: skip
        gradient = tl.dot(slopes, own, input_precision="ieee")
        passed = tl.load(dout_row + column * dout_step, mask=inside, other=0.0).to(tl.float32)
        one = vector[:, None]
        gradient += tl.where(one == 0, passed[None, :], 0.0)
        at = one * 0 + (sample * features + column)[None, :]
        tl.store(ddense_ptr + at, gradient, mask=(one == 0) & inside[None, :])
        at = (sample * (vectors - 1) + one - 1) * features + column[None, :]
        tl.store(dsparse_ptr + at, gradient, mask=(one > 0) & (one < vectors) & inside[None, :])


def _empty(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    tables = sparse.shape[1]
    shape = (dense.shape[0], dense.shape[1] + tables * (tables + 1) // 2)
    return torch.empty(shape, dtype=dense.dtype, device=dense.device)


@torch.library.custom_op("reference_kernels::dot_interaction", mutates_args=())
def _dot_interaction(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    out = _empty(dense, sparse)
    if out.numel() == 0:
        return out
    vectors, features = sparse.shape[1] + 1, dense.shape[1]
    block_vectors, block_features, warps = config(vectors, features, dense.dtype)
    with placed(dense.device):
        whole = features <= block_features
        _interaction_kernel[(min(len(dense), PROGRAMS) if whole else len(dense),)](
            out,
            dense,
            sparse,
            len(dense),
            vectors,
            features,
            out.shape[1],
            *dense.stride(),
            *sparse.stride(),
            WHOLE=whole,
            BLOCK_VECTORS=block_vectors,
            BLOCK_FEATURES=block_features,
            num_warps=warps,
            num_stages=1,
        )
    return out


@_dot_interaction.register_fake
def _(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    return _empty(dense, sparse)


@torch.library.custom_op("reference_kernels::dot_interaction_backward", mutates_args=())
def _dot_interaction_backward(
    dout: torch.Tensor, dense: torch.Tensor, sparse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by the dense and the sparse vectors, in one launch."""
    ddense, dsparse = (torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (dense, sparse))
    if dense.numel() == 0:
        return ddense, dsparse
    vectors, features = sparse.shape[1] + 1, dense.shape[1]
    block_vectors, block_features, warps = config(vectors, features, dense.dtype)
    with placed(dense.device):
        _interaction_backward_kernel[(len(dense),)](
            ddense,
            dsparse,
            dout,
            dense,
            sparse,
            vectors,
            features,
            *dout.stride(),
            *dense.stride(),
            *sparse.stride(),
            BLOCK_VECTORS=block_vectors,
            BLOCK_FEATURES=block_features,
            num_warps=warps,
            num_stages=1,
        )
    return ddense, dsparse


@_dot_interaction_backward.register_fake
def _(_: torch.Tensor, dense: torch.Tensor, sparse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ddense, dsparse = (torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (dense, sparse))
    return ddense, dsparse


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 -- passed by name
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ddense, dsparse = _dot_interaction_backward(dout, *ctx.saved_tensors)
    return ddense, dsparse


_dot_interaction.register_autograd(_differentiate, setup_context=_save)


def dot_interaction(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """A sample's dense features and the products of all pairs of its vectors: contiguous ``(batch, features + pairs)``.

    ``dense`` is ``(batch, features)``, ``sparse`` ``(batch, tables, features)`` of its dtype, float32, float16 or
    bfloat16, any strides; the order of pairs is that of `dot_interaction_reference`. Differentiable once by both, in
    one launch. Raises `TypeError` for other or mixed dtypes; `ValueError` for shapes that do not fit, more than
    `MOST_VECTORS` vectors, or mixed devices.
    """
    check_tensor("dot_interaction", "dense", dense, dense, FLOATS)
    check_tensor("dot_interaction", "sparse", sparse, dense, (dense.dtype,))
    if dense.ndim != 2 or sparse.ndim != 3 or (len(sparse), sparse.shape[2]) != dense.shape:
        raise ValueError(
            f"dot_interaction: dense {tuple(dense.shape)} and sparse {tuple(sparse.shape)} do not fit; they are "
            "(batch, features) and (batch, tables, features)"
        )
    if sparse.shape[1] >= MOST_VECTORS:
        raise ValueError(f"dot_interaction: there are {sparse.shape[1]} tables, supported: up to {MOST_VECTORS - 1}")
    out: torch.Tensor = _dot_interaction(dense, sparse)
    return out
