"""Fused dequantisation and matrix product: codes become numbers in registers, scales meet the sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_kernels._common import FLOATS, Rows, check_tensor, jit, placed, row_offset
from reference_kernels._sums import added_parts
from reference_kernels.dequant_matmul.codes import FP8, GROUPS
from reference_kernels.dequant_matmul.float8 import fp8_by_tiles
from reference_kernels.dequant_matmul.numbers import eight_bits, four_bits, four_bits_in_order, settled
from reference_kernels.dequant_matmul.tiles import FEWEST, Kind, config
from reference_kernels.linear.products import grouped

HALVES = (torch.float16, torch.bfloat16)
DEAL_BLOCK, DEAL_WARPS = 1024, 4


@jit
def _columns(
    x_rows: tl.tensor,
    k: tl.tensor,
    K: tl.tensor,
    x_step: tl.tensor,
    inside: tl.tensor,
    EVEN: tl.constexpr,
    MASK: tl.constexpr,
) -> tl.tensor:
    """Columns ``k`` of rows of ``x``, as columns; 0 beyond ``K``, and with ``MASK`` in rows that are not ``inside``.

    ``k`` has 32 bits, so that an address takes one instruction where ``x_step`` is 1: 264 in a step of int4, for 284.
    """
    at = x_rows + (k.to(tl.int64) * x_step)[None, :]
    if EVEN:
        x = tl.load(at, mask=inside, other=0.0) if MASK else tl.load(at)
    else:
        k_inside = (k < K)[None, :]
        x = tl.load(at, mask=inside & k_inside if MASK else k_inside, other=0.0)
    return tl.trans(x)


@jit
def _dequant_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    x_scales_stride0: tl.tensor,
    x_scales_stride1: tl.tensor,
    x_scales_stride2: tl.tensor,
    codes_stride_n: tl.tensor,
    codes_stride_k: tl.tensor,
    scales_stride_n: tl.tensor,
    scales_stride_k: tl.tensor,
    splits: tl.tensor,
    steps: tl.tensor,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """One tile of the result, or of one of its ``splits`` parts of ``steps`` blocks of ``k``: contiguous ``(splits, M,
    N)``. ``BLOCK_K`` is a group of int4. ``EVEN``: it divides ``K``. "int8 words" are two codes each, and ``x`` is what
    `_deal_kernel` makes of it.

    Rows beyond the last, of either operand, are read as the last again, which takes no masks, and are not stored. But
    where a tile has few rows of ``x`` they are masked: most loads would wait for the same line (int8, one row: 96 us).
    """
    MASK: tl.constexpr = BLOCK_M <= 16
    split = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits
    block_n, block_m = grouped(tile, tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M), GROUP)
    n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n_last, m_last = tl.minimum(n, N - 1), tl.minimum(m, M - 1)
    x_rows = x_ptr + row_offset(m_last, size1, size2, x_stride0, x_stride1, x_stride2)[:, None]
    codes_rows = codes_ptr + (n_last * codes_stride_n)[:, None]
    lane = tl.arange(0, BLOCK_K)
    m_inside = (m < M)[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    begin = split * steps
    last = tl.minimum(begin + steps, tl.cdiv(K, BLOCK_K))
    if KIND == "int4":
        QUARTER: tl.constexpr = BLOCK_K // 4
        word = tl.arange(0, QUARTER)
        groups = tl.cdiv(K, BLOCK_K)
        scales_at = scales_ptr + n_last * scales_stride_n
        # A scale is loaded a step before its group: a load that is waited for in each step took as long as the codes.
        next_scale = tl.load(scales_at + begin * scales_stride_k, mask=begin < last, other=0.0)
        for step in range(begin, last):
            scale = next_scale.to(tl.float32)
            next_scale = tl.load(scales_at + tl.minimum(step + 1, groups - 1) * scales_stride_k)
            words = tl.load(codes_rows + ((step * QUARTER + word).to(tl.int64) * codes_stride_k)[None, :])
            if BLOCK_M > 8:
                x = _columns(x_rows, step * BLOCK_K + lane, K, x_step, m_inside, EVEN, MASK)
                part = tl.dot(four_bits_in_order(words, x.dtype), x)
            else:
                # By mma.sync, for 16 rows, one product took 353 instructions a step where four took 307.
                k = step * BLOCK_K + word
                first = _columns(x_rows, k, K, x_step, m_inside, EVEN, MASK)
                second = _columns(x_rows, k + QUARTER, K, x_step, m_inside, EVEN, MASK)
                third = _columns(x_rows, k + 2 * QUARTER, K, x_step, m_inside, EVEN, MASK)
                fourth = _columns(x_rows, k + 3 * QUARTER, K, x_step, m_inside, EVEN, MASK)
                part = tl.dot(four_bits(words, 0, first.dtype), first)
                part = tl.dot(four_bits(words, 4, first.dtype), second, part)
                part = tl.dot(four_bits(words, 8, first.dtype), third, part)
                part = tl.dot(four_bits(words, 12, first.dtype), fourth, part)
            total += part * scale[:, None]
    else:
        for step in range(begin, last):
            k = step * BLOCK_K + lane
            codes_at = codes_rows + (k.to(tl.int64) * codes_stride_k)[None, :]
            if EVEN:
                codes = tl.load(codes_at)
            else:
                codes = tl.load(codes_at, mask=(k < K)[None, :], other=0.0 if KIND == "fp8" else 0)
            x = _columns(x_rows, k, K, x_step, m_inside, EVEN, MASK)
            if KIND == "fp8":
                # Hopper's tensor cores keep some 14 bits of a float8 sum: every 128 products it is taken out of them.
                total = tl.dot(codes, x, total, max_num_imprecise_acc=BLOCK_K)
            elif KIND == "int8 words":
                odd = _columns(x_rows + K, k, K, x_step, m_inside, EVEN, MASK)
                total = tl.dot(eight_bits(codes, 0, x.dtype), x, total)
                total = settled(tl.dot(eight_bits(codes, 8, x.dtype), odd, total))
            else:
                total = tl.dot(codes.to(x.dtype), x, total)
    if KIND != "int4":
        scale = tl.load(scales_ptr + n_last * scales_stride_n).to(tl.float32)
        total *= scale[:, None]
    if KIND == "fp8":
        at = row_offset(m_last, size1, size2, x_scales_stride0, x_scales_stride1, x_scales_stride2)
        total *= tl.load(x_scales_ptr + at)[None, :]
    y_at = (split.to(tl.int64) * M + m)[:, None] * N + n[None, :]
    tl.store(out_ptr + y_at, tl.trans(total), mask=(m < M)[:, None] & (n < N)[None, :])


@jit
def _deal_kernel(
    y_ptr: tl.tensor,
    x_ptr: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    K: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Columns of even number of ``x``, then those of odd number, of each row: contiguous ``(rows, 2, K / 2)``."""
    row, half = tl.program_id(0).to(tl.int64), K // 2
    column = tl.program_id(1).to(tl.int64) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    x_row = x_ptr + row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2)
    pairs = tl.load(x_row + column * x_step, mask=column < K, other=0.0)
    even, odd = tl.split(tl.reshape(pairs, [BLOCK, 2]))
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y_row = y_ptr + row * K
    tl.store(y_row + at, even, mask=at < half)
    tl.store(y_row + half + at, odd, mask=at < half)


def _launch(
    y: torch.Tensor,
    x: torch.Tensor,
    x_scales: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    kind: Kind,
    group: int = 128,
) -> torch.Tensor:
    """Write ``y``; ``x_scales`` are ``(*batch, 1)``, or ``x`` where there are none, ``scales`` of at least one
    dimension."""
    if y.numel() == 0:
        return y
    depth = x.shape[-1]
    rows = Rows.of(x, x_scales)
    tile = config(rows.count, len(codes), depth, kind, group)
    steps = triton.cdiv(triton.cdiv(depth, tile.k), tile.splits)
    splits = max(1, triton.cdiv(triton.cdiv(depth, tile.k), max(1, steps)))
    out = y if splits == 1 else torch.empty((splits, y.numel()), dtype=torch.float32, device=y.device)
    tiles = triton.cdiv(len(codes), tile.n) * triton.cdiv(rows.count, tile.m)
    with placed(x.device):
        _dequant_kernel[(tiles * splits,)](
            out,
            *rows.tensors,
            codes,
            scales,
            rows.count,
            len(codes),
            depth,
            *rows.sizes[1:],
            *rows.strides[0],
            *rows.strides[1][:3],
            *codes.stride(),
            scales.stride(0),
            scales.stride(1) if scales.ndim > 1 else 0,
            splits,
            steps,
            KIND=kind,
            EVEN=depth % tile.k == 0,
            BLOCK_N=tile.n,
            BLOCK_M=tile.m,
            BLOCK_K=tile.k,
            GROUP=tile.group,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    if splits > 1:
        added_parts(y.view(1, -1), out.unsqueeze(1))
    return y


def _result(x: torch.Tensor, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], codes.shape[0]), dtype=dtype, device=x.device)


def _in_words(codes: torch.Tensor) -> torch.Tensor | None:
    """int8 codes ``(n, k)`` as int16 ``(n, k / 2)``, where neighbours are next to each other and pairs aligned."""
    if codes.numel() == 0 or codes.stride(1) != 1 or codes.data_ptr() % 2:
        return None
    if codes.shape[1] % 2 or codes.stride(0) % 2 or codes.storage_offset() % 2:
        return None
    return codes.view(torch.int16)


def _dealt(x: torch.Tensor) -> torch.Tensor:
    """``x`` with its columns of even number first: a product takes the codes of a word's low and high bytes as they
    come, with the columns that they meet next to each other."""
    rows = Rows.of(x)
    y = torch.empty((rows.count, x.shape[-1]), dtype=x.dtype, device=x.device)
    with placed(x.device):
        _deal_kernel[(rows.count, triton.cdiv(x.shape[-1], 2 * DEAL_BLOCK))](
            y, x, *rows.layout, x.shape[-1], BLOCK=DEAL_BLOCK, num_warps=DEAL_WARPS
        )
    return y


@torch.library.custom_op("reference_kernels::int8_linear", mutates_args=())
def _int8_linear(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    words = _in_words(codes) if x.numel() > FEWEST * x.shape[-1] else None
    if words is not None:
        even = _dealt(x)[:, : x.shape[-1] // 2]
        return _launch(_result(x, codes, x.dtype), even, even, words, scales, "int8 words")
    return _launch(_result(x, codes, x.dtype), x, x, codes, scales, "int8")


@_int8_linear.register_fake
def _(x: torch.Tensor, codes: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return _result(x, codes, x.dtype)


@torch.library.custom_op("reference_kernels::int4_linear", mutates_args=())
def _int4_linear(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    return _launch(_result(x, packed, x.dtype), x, x, packed, scales, "int4", group)


@_int4_linear.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, _: torch.Tensor, __: int) -> torch.Tensor:
    return _result(x, packed, x.dtype)


@torch.library.custom_op("reference_kernels::fp8_linear", mutates_args=())
def _fp8_linear(
    x: torch.Tensor, codes: torch.Tensor, x_scales: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    check_float8(x.device)
    by_row = x_scales.expand(*x.shape[:-1], 1)
    by_column = scales.expand(len(codes))
    y = _result(x, codes, dtype)
    if y.numel() and fp8_by_tiles(y, x, by_row, codes, by_column):
        return y
    return _launch(y, x, by_row, codes, by_column, "fp8")


@_fp8_linear.register_fake
def _(x: torch.Tensor, codes: torch.Tensor, _: torch.Tensor, __: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _result(x, codes, dtype)


def int8_linear(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``x @ (codes * scales).T``: ``(*batch, k)`` in float16 or bfloat16, by int8 ``(n, k)`` with a scale for each
    row, ``(n,)`` in float32, float16 or bfloat16, to contiguous ``(*batch, n)``.

    Any strides. Codes are exact in 16 bits; sums in float32, times the scale, rounded once: see
    `int8_linear_reference`. No gradients. Raises `TypeError` for other dtypes; `ValueError` for shapes that do not fit,
    or mixed devices.
    """
    _check("int8_linear", x, codes, scales, HALVES, torch.int8)
    _check_shapes("int8_linear", x, codes, x.shape[-1], "codes")
    _check_scales("int8_linear", "scales", scales, codes.shape[:1])
    y: torch.Tensor = _int8_linear(x, codes, scales)
    return y


def int4_linear(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int = 128) -> torch.Tensor:
    """As `int8_linear` with codes from -8 to 7 that `pack_int4` has packed: int16 ``(n, ceil(k / group) * group //
    4)``, and a scale for each ``group`` of 64 or 128 columns, ``(n, ceil(k / group))``.

    Each group's sum is multiplied by its scale in float32. Raises as `int8_linear` does, and `ValueError` for another
    group.
    """
    if group not in GROUPS:
        raise ValueError(f"int4_linear: group is {group}, supported: {', '.join(map(str, GROUPS))}")
    _check("int4_linear", x, packed, scales, HALVES, torch.int16)
    groups = triton.cdiv(x.shape[-1], group)
    _check_shapes("int4_linear", x, packed, groups * group // 4, "packed")
    _check_scales("int4_linear", "scales", scales, torch.Size((packed.shape[0], groups)))
    y: torch.Tensor = _int4_linear(x, packed, scales, group)
    return y


def fp8_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    x_scales: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``(x * x_scales) @ (codes * scales).T``: float8_e4m3fn ``(*batch, k)`` by ``(n, k)`` to contiguous ``(*batch,
    n)`` of ``dtype``, float32, float16 or bfloat16.

    Scales are float32: ``x_scales`` ``(*batch, 1)``, as `norm_quant` gives them, or one for all, 0-d; ``scales``
    ``(n,)`` or 0-d. Any strides. Sums in float32 (see the card for what tensor cores make of that), times both scales,
    rounded once: see `fp8_linear_reference`. No gradients. Raises `TypeError` for other dtypes; `ValueError` for shapes
    that do not fit, mixed devices, or a GPU without float8.
    """
    if dtype not in FLOATS:
        raise TypeError(f"fp8_linear: dtype is {dtype}, allowed: float32, float16, bfloat16")
    _check("fp8_linear", x, codes, scales, (FP8,), FP8)
    check_tensor("fp8_linear", "x_scales", x_scales, x, (torch.float32,))
    _check_shapes("fp8_linear", x, codes, x.shape[-1], "codes")
    _check_scales("fp8_linear", "scales", scales, codes.shape[:1], torch.Size(()))
    _check_scales("fp8_linear", "x_scales", x_scales, torch.Size((*x.shape[:-1], 1)), torch.Size(()))
    y: torch.Tensor = _fp8_linear(x, codes, x_scales, scales, dtype)
    return y


def _check(
    kernel: str,
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    inputs: tuple[torch.dtype, ...],
    kind: torch.dtype,
) -> None:
    check_tensor(kernel, "x", x, x, inputs)
    check_tensor(kernel, "packed" if kind == torch.int16 else "codes", codes, x, (kind,))
    check_tensor(kernel, "scales", scales, x, (torch.float32,) if kind == FP8 else FLOATS)
    if x.ndim == 0:
        raise ValueError(f"{kernel}: x has no dimension to sum over; give it at least one")


def _check_shapes(kernel: str, x: torch.Tensor, codes: torch.Tensor, wanted: int, name: str) -> None:
    if codes.ndim != 2 or codes.shape[1] != wanted:
        raise ValueError(f"{kernel}: {name} has shape {tuple(codes.shape)}, x {tuple(x.shape)} needs (n, {wanted})")


def _check_scales(kernel: str, name: str, scales: torch.Tensor, *allowed: torch.Size) -> None:
    if scales.shape not in allowed:
        raise ValueError(
            f"{kernel}: {name} has shape {tuple(scales.shape)}, allowed: {' or '.join(str(tuple(a)) for a in allowed)}"
        )


def check_float8(device: torch.device) -> None:
    """Raise `ValueError` for a GPU without float8."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(
            f"fp8_linear: {device} has no float8, which begins with capability 8.9; use int8_linear, whose input stays "
            "float16 or bfloat16"
        )
