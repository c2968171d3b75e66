"""Fused bags of embeddings: the sums or means of all bags of all tables in one launch; gradients without atomics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl

from reference_kernels._common import FLOATS, INTERPRETED, check_tensor, jit, placed

Mode = Literal["sum", "mean"]
INDICES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class BagTile:
    """``samples`` rows of ``columns`` elements at a time, and warps; ``rows`` of a table's gradient per program."""

    samples: int
    columns: int
    warps: int
    rows: int


def config(features: int, dtype: torch.dtype, *, interpreted: bool = INTERPRETED) -> BagTile:
    """Tile for rows of ``features`` elements of ``dtype``.

    A warp reads 2 KiB at a time, four loads of 16 bytes a thread: the 32 programs that a multiprocessor holds keep
    64 KiB under way, some three times what its share of the bandwidth times the latency requires. Rows past 1 KiB take
    several programs. Interpreted, tiles are small, so that bags of a few rows already take several.
    """
    if interpreted:
        return BagTile(4, min(32 if features <= 128 else 1024, max(16, triton.next_power_of_2(features))), 1, 4)
    columns = min(1024 // dtype.itemsize, max(16, triton.next_power_of_2(features)))
    samples = min(32, max(2, 2048 // (columns * dtype.itemsize)))
    return BagTile(samples, columns, 1, 8)


@jit
def _bags_kernel(
    out_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    samples: tl.tensor,
    rows: tl.tensor,
    tables: tl.tensor,
    batch: tl.tensor,
    features: tl.tensor,
    weight_row: tl.tensor,
    weight_step: tl.tensor,
    starts_step: tl.tensor,
    indices_step: tl.tensor,
    offsets_step: tl.tensor,
    scales_step: tl.tensor,
    HAS_SCALES: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """A block of columns of one bag; ``out`` is contiguous ``(batch, tables, features)``. A row that does not exist is
    not read, and is NaN."""
    bag = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    table = bag // batch
    begin = tl.maximum(tl.load(offsets_ptr + bag * offsets_step).to(tl.int64), 0)
    end = tl.minimum(tl.load(offsets_ptr + (bag + 1) * offsets_step).to(tl.int64), samples)
    top = tl.load(starts_ptr + table * starts_step)
    bottom = tl.minimum(tl.load(starts_ptr + (table + 1) * starts_step), rows)
    total = tl.zeros([BLOCK_SAMPLES, BLOCK_COLUMNS], tl.float32)
    for first in range(begin, end, BLOCK_SAMPLES):
        sample = first + tl.arange(0, BLOCK_SAMPLES)
        inside = sample < end
        index = tl.load(indices_ptr + sample * indices_step, mask=inside, other=0).to(tl.int64)
        row = top + index
        known = inside & (index >= 0) & (row >= 0) & (row < bottom)
        at = (row * weight_row)[:, None] + (column * weight_step)[None, :]
        wanted = known[:, None] & (column < features)[None, :]
        value = tl.load(weight_ptr + at, mask=wanted, other=float("nan")).to(tl.float32)
        if HAS_SCALES:
            scale = tl.load(scales_ptr + sample * scales_step, mask=inside, other=0.0).to(tl.float32)
            value = value * scale[:, None]
        total += tl.where(inside[:, None], value, 0.0)
    result = tl.sum(total, axis=0)
    if MEAN:
        result = result / tl.maximum(end - begin, 1).to(tl.float32)
    at = ((bag % batch) * tables + table) * features + column
    tl.store(out_ptr + at, result, mask=column < features)


@jit
def _rows_kernel(
    dweight_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    order_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    bags_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    rows: tl.tensor,
    batch: tl.tensor,
    features: tl.tensor,
    dout_sample: tl.tensor,
    dout_table: tl.tensor,
    dout_step: tl.tensor,
    offsets_step: tl.tensor,
    scales_step: tl.tensor,
    HAS_SCALES: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """A block of columns of ``BLOCK_ROWS`` rows of the table's gradient, contiguous ``(rows, features)``.

    ``order`` has the samples sorted by their row; those of row ``r`` lie from ``bounds[r]`` to ``bounds[r + 1] - 1``.
    """
    column = tl.program_id(1).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    top = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    for row in range(top, tl.minimum(top + BLOCK_ROWS, rows)):
        begin = tl.load(bounds_ptr + row)
        end = tl.load(bounds_ptr + row + 1)
        total = tl.zeros([BLOCK_SAMPLES, BLOCK_COLUMNS], tl.float32)
        for first in range(begin, end, BLOCK_SAMPLES):
            place = first + tl.arange(0, BLOCK_SAMPLES)
            inside = place < end
            sample = tl.load(order_ptr + place, mask=inside, other=0)
            bag = tl.load(bags_ptr + sample, mask=inside, other=0)
            at = ((bag % batch) * dout_sample + (bag // batch) * dout_table)[:, None] + (column * dout_step)[None, :]
            wanted = inside[:, None] & (column < features)[None, :]
            value = tl.load(dout_ptr + at, mask=wanted, other=0.0).to(tl.float32)
            if MEAN:
                after = tl.load(offsets_ptr + (bag + 1) * offsets_step, mask=inside, other=1).to(tl.int64)
                before = tl.load(offsets_ptr + bag * offsets_step, mask=inside, other=0).to(tl.int64)
                value = value / (after - before).to(tl.float32)[:, None]
            if HAS_SCALES:
                scale = tl.load(scales_ptr + sample * scales_step, mask=inside, other=0.0).to(tl.float32)
                value = tl.where(inside[:, None], value * scale[:, None], 0.0)
            total += value
        tl.store(dweight_ptr + row * features + column, tl.sum(total, axis=0), mask=column < features)


@jit
def _scales_kernel(
    dscales_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    bags_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    samples: tl.tensor,
    batch: tl.tensor,
    features: tl.tensor,
    dout_sample: tl.tensor,
    dout_table: tl.tensor,
    dout_step: tl.tensor,
    weight_row: tl.tensor,
    weight_step: tl.tensor,
    offsets_step: tl.tensor,
    MEAN: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """The gradient of ``BLOCK_SAMPLES`` sample weights: each the product of its row with its bag's gradient. NaN where
    the row (-1) does not exist."""
    sample = tl.program_id(0).to(tl.int64) * BLOCK_SAMPLES + tl.arange(0, BLOCK_SAMPLES)
    inside = sample < samples
    row = tl.load(rows_ptr + sample, mask=inside, other=-1)
    bag = tl.load(bags_ptr + sample, mask=inside, other=0)
    known = row >= 0
    dout_row = (bag % batch) * dout_sample + (bag // batch) * dout_table
    total = tl.zeros([BLOCK_SAMPLES, BLOCK_COLUMNS], tl.float32)
    for first in range(0, features, BLOCK_COLUMNS):
        column = first + tl.arange(0, BLOCK_COLUMNS).to(tl.int64)
        wanted = known[:, None] & (column < features)[None, :]
        dout = tl.load(dout_ptr + dout_row[:, None] + (column * dout_step)[None, :], mask=wanted, other=0.0)
        at = (row * weight_row)[:, None] + (column * weight_step)[None, :]
        total += dout.to(tl.float32) * tl.load(weight_ptr + at, mask=wanted, other=0.0).to(tl.float32)
    result = tl.sum(total, axis=1)
    if MEAN:
        after = tl.load(offsets_ptr + (bag + 1) * offsets_step, mask=known, other=1).to(tl.int64)
        before = tl.load(offsets_ptr + bag * offsets_step, mask=known, other=0).to(tl.int64)
        result = result / (after - before).to(tl.float32)
    tl.store(dscales_ptr + sample, tl.where(known, result, float("nan")), mask=inside)


def _check_numbers(weight: torch.Tensor, starts: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> None:
    """Read back what decides about addresses; raises `ValueError`."""
    if int(starts[0]) != 0 or int(starts[-1]) != len(weight) or bool((starts.diff() < 0).any()):
        raise ValueError(
            f"embedding_bag: starts must rise from 0 to the {len(weight)} rows of weight, got {starts.tolist()}"
        )
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(indices) or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"embedding_bag: offsets must rise from 0 to the number of indices, {len(indices)}; they go from "
            f"{int(offsets[0])} to {int(offsets[-1])}"
        )
    if len(indices):
        rows, bags = _rows_of(weight, starts, indices, offsets)
        if bool((rows < 0).any()):
            first = int((rows < 0).nonzero()[0])
            table = int(bags[first]) * (len(starts) - 1) // (len(offsets) - 1)
            size = int(starts[table + 1] - starts[table])
            raise ValueError(
                f"embedding_bag: indices[{first}] is {int(indices[first])}, but table {table} has {size} rows; "
                "indices count from the start of their table"
            )


def _rows_of(
    weight: torch.Tensor, starts: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of ``weight`` and bag of each sample, int64 ``(samples,)``; -1 for a row that does not exist."""
    bags = len(offsets) - 1
    sample = torch.arange(len(indices), device=indices.device)
    bag = torch.searchsorted(offsets.long(), sample, right=True) - 1
    known = (bag >= 0) & (bag < bags) & (indices >= 0)
    bag = bag.clamp(0, bags - 1)
    table = bag // (bags // (len(starts) - 1))
    row = starts[table] + indices
    known &= (row >= 0) & (row < starts[table + 1]) & (row < len(weight))
    return torch.where(known, row, -1), bag


def _empty(weight: torch.Tensor, starts: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    tables = starts.shape[0] - 1
    shape = ((offsets.shape[0] - 1) // tables, tables, weight.shape[1])
    return torch.empty(shape, dtype=weight.dtype, device=weight.device)


@torch.library.custom_op("reference_kernels::embedding_bag", mutates_args=())
def _embedding_bag(
    weight: torch.Tensor,
    starts: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    sample_weights: torch.Tensor | None,
    mean: bool,
    checked: bool,
) -> torch.Tensor:
    if checked:
        _check_numbers(weight, starts, indices, offsets)
    out = _empty(weight, starts, offsets)
    if out.numel() == 0:
        return out
    batch, tables, features = out.shape
    tile = config(features, weight.dtype)
    with placed(weight.device):
        _bags_kernel[(batch * tables, triton.cdiv(features, tile.columns))](
            out,
            weight,
            starts,
            indices,
            offsets,
            weight if sample_weights is None else sample_weights,
            len(indices),
            len(weight),
            tables,
            batch,
            features,
            *weight.stride(),
            starts.stride(0),
            indices.stride(0),
            offsets.stride(0),
            1 if sample_weights is None else sample_weights.stride(0),
            HAS_SCALES=sample_weights is not None,
            MEAN=mean,
            BLOCK_SAMPLES=tile.samples,
            BLOCK_COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return out


@_embedding_bag.register_fake
def _(weight: torch.Tensor, starts: torch.Tensor, _: torch.Tensor, offsets: torch.Tensor, *__: object) -> torch.Tensor:
    return _empty(weight, starts, offsets)


@torch.library.custom_op("reference_kernels::embedding_bag_backward", mutates_args=())
def _embedding_bag_backward(
    dout: torch.Tensor,
    weight: torch.Tensor,
    starts: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    sample_weights: torch.Tensor | None,
    mean: bool,
    of_weight: bool,
    of_samples: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by weight and by sample weights; empty where they are not needed."""
    dweight, dsamples = _gradients(weight, sample_weights, of_weight, of_samples)
    if dout.numel() == 0 or len(indices) == 0:
        return dweight.zero_(), dsamples.zero_()
    rows, bags = _rows_of(weight, starts, indices, offsets)
    batch, _, features = dout.shape
    tile = config(features, weight.dtype)
    if of_weight:
        ordered, order = torch.sort(rows, stable=True)
        bounds = torch.searchsorted(ordered, torch.arange(len(weight) + 1, device=weight.device))
        with placed(weight.device):
            _rows_kernel[(triton.cdiv(len(weight), tile.rows), triton.cdiv(features, tile.columns))](
                dweight,
                dout,
                order,
                bounds,
                bags,
                offsets,
                weight if sample_weights is None else sample_weights,
                len(weight),
                batch,
                features,
                *dout.stride(),
                offsets.stride(0),
                1 if sample_weights is None else sample_weights.stride(0),
                HAS_SCALES=sample_weights is not None,
                MEAN=mean,
                BLOCK_ROWS=tile.rows,
                BLOCK_SAMPLES=tile.samples,
                BLOCK_COLUMNS=tile.columns,
                num_warps=tile.warps,
            )
    if of_samples:
        with placed(weight.device):
            _scales_kernel[(triton.cdiv(len(indices), tile.samples),)](
                dsamples,
                dout,
                weight,
                rows,
                bags,
                offsets,
                len(indices),
                batch,
                features,
                *dout.stride(),
                *weight.stride(),
                offsets.stride(0),
                MEAN=mean,
                BLOCK_SAMPLES=tile.samples,
                BLOCK_COLUMNS=tile.columns,
                num_warps=tile.warps,
            )
    return dweight, dsamples


def _gradients(
    weight: torch.Tensor, sample_weights: torch.Tensor | None, of_weight: bool, of_samples: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dweight = torch.empty(weight.shape if of_weight else (0,), dtype=weight.dtype, device=weight.device)
    like = weight if sample_weights is None else sample_weights
    return dweight, torch.empty(like.shape if of_samples else (0,), dtype=like.dtype, device=like.device)


@_embedding_bag_backward.register_fake
def _(
    _dout: torch.Tensor,
    weight: torch.Tensor,
    _starts: torch.Tensor,
    _indices: torch.Tensor,
    _offsets: torch.Tensor,
    sample_weights: torch.Tensor | None,
    _mean: bool,
    of_weight: bool,
    of_samples: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _gradients(weight, sample_weights, of_weight, of_samples)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 -- passed by name
    *tensors, ctx.mean, _ = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    needed = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
    dweight, dsamples = _embedding_bag_backward(dout, *ctx.saved_tensors, ctx.mean, *needed)
    return dweight if needed[0] else None, None, None, None, dsamples if needed[1] else None, None, None


_embedding_bag.register_autograd(_differentiate, setup_context=_save)


def embedding_bag(
    weight: torch.Tensor,
    starts: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    sample_weights: torch.Tensor | None = None,
    mode: Mode = "sum",
    checked: bool = True,
) -> torch.Tensor:
    """Sums or means of rows of several tables: contiguous ``(batch, tables, features)`` of ``weight``'s dtype.

    ``weight`` is ``(rows, features)`` in float32, float16 or bfloat16, ``starts`` int64 ``(tables + 1,)``, ``indices``
    ``(samples,)`` and ``offsets`` ``(tables * batch + 1,)`` int32 or int64, ``sample_weights`` ``(samples,)`` in any of
    the floating dtypes. Any strides. What they mean says `embedding_bag_reference`. Differentiable once by ``weight``,
    densely, and by ``sample_weights``.

    ``checked`` numbers are read back before the launch, which on a CUDA device waits for it. Unchecked ones reach no
    memory outside of the tensors, and a bag with a row that does not exist is NaN. Raises `TypeError` for other dtypes;
    `ValueError` for shapes that do not fit, numbers out of range, an unknown mode, or mixed devices.
    """
    name = "embedding_bag"
    if mode not in get_args(Mode):
        raise ValueError(f"{name}: mode is {mode!r}, known: {', '.join(get_args(Mode))}")
    check_tensor(name, "weight", weight, weight, FLOATS)
    check_tensor(name, "starts", starts, weight, (torch.int64,))
    check_tensor(name, "indices", indices, weight, INDICES)
    check_tensor(name, "offsets", offsets, weight, INDICES)
    if weight.ndim != 2:
        raise ValueError(f"{name}: weight has shape {tuple(weight.shape)}, it must be (rows, features) of all tables")
    for label, each, least in (("starts", starts, 2), ("indices", indices, 0), ("offsets", offsets, 1)):
        if each.ndim != 1 or len(each) < least:
            raise ValueError(
                f"{name}: {label} has shape {tuple(each.shape)}; starts is (tables + 1,) of at least one table, "
                "indices (samples,) and offsets (tables * batch + 1,)"
            )
    if (len(offsets) - 1) % (len(starts) - 1):
        raise ValueError(f"{name}: {len(offsets) - 1} bags are no multiple of {len(starts) - 1} tables")
    if sample_weights is not None:
        check_tensor(name, "sample_weights", sample_weights, weight, FLOATS)
        if sample_weights.shape != indices.shape:
            raise ValueError(
                f"{name}: sample_weights has shape {tuple(sample_weights.shape)}, indices {tuple(indices.shape)}; "
                "there is one for each sample"
            )
    out: torch.Tensor = _embedding_bag(weight, starts, indices, offsets, sample_weights, mode == "mean", checked)
    return out
