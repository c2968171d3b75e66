"""Products of large matrices in 16 bits: the hardware copies whole tiles of the operands (TMA), by descriptors that the
launchers make where a layout has them, and a program computes several tiles, so that it reads the next one while it
stores the last.

What a descriptor reads beyond the end of a matrix is 0, and what it stores there is left out, so nothing is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from reference_kernels._activations import activated, slope
from reference_kernels._common import INTERPRETED, Rows, jit, placed
from reference_kernels.linear.products import MatmulTile, grouped, halves_of

_ALIGNED = 16  # bytes, of the address and of every stride but that of neighbours, which is one element
_LARGEST = 2**31 - 1  # offsets are int32
_FURTHEST = 2**40  # bytes, of a stride


@jit
def block_of(matrix: tl.tensor, row: tl.tensor, column: tl.tensor, TURNED: tl.constexpr) -> tl.tensor:
    """The block that begins there; ``TURNED``: of a matrix that is described as its transposed."""
    if TURNED:
        block = tl.trans(matrix.load([column, row]))
    else:
        block = matrix.load([row, column])
    return block


@jit
def _product(
    total: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    K: tl.tensor,
    X_TURNED: tl.constexpr,
    WEIGHT_TURNED: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """``total`` and ``x @ weight.T`` of the tile that begins at row ``m`` and column ``n``."""
    for k in range(0, K, BLOCK_K):
        rows = block_of(x, m, k, X_TURNED)
        total = tl.dot(rows, tl.trans(block_of(weight, n, k, WEIGHT_TURNED)), total)
    return total


@jit
def finish_linear(
    total: tl.tensor,
    y: tl.tensor,
    bias_ptr: tl.tensor,
    bias_step: tl.tensor,
    N: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    if PARTS > 1:
        left, right = halves_of(total)
        more: tl.constexpr = PARTS // 2
        finish_linear(left, y, bias_ptr, bias_step, N, m, n, HAS_BIAS, ACTIVATION, more)
        n += left.shape[1]
        finish_linear(right, y, bias_ptr, bias_step, N, m, n, HAS_BIAS, ACTIVATION, more)
    else:
        if HAS_BIAS:
            at = n + tl.arange(0, total.shape[1])
            bias = tl.load(bias_ptr + at.to(tl.int64) * bias_step, mask=at < N, other=0.0)
            total += bias.to(tl.float32)[None, :]
        y.store([m, n], activated(total, ACTIVATION, y.dtype).to(y.dtype))


@jit
def _linear_tiles_kernel(
    y: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias_ptr: tl.tensor,
    bias_step: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    programs: tl.tensor,
    X_TURNED: tl.constexpr,
    WEIGHT_TURNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Every ``programs``-th tile of ``y = activation(x @ weight.T + bias)``."""
    blocks_m, blocks_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), blocks_m * blocks_n, programs, flatten=True):
        block_m, block_n = grouped(tile, blocks_m, blocks_n, GROUP)
        m, n = block_m * BLOCK_M, block_n * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        total = _product(total, x, weight, m, n, K, X_TURNED, WEIGHT_TURNED, BLOCK_K)
        finish_linear(total, y, bias_ptr, bias_step, N, m, n, HAS_BIAS, ACTIVATION, PARTS)


@jit
def _finish_gated(
    gate: tl.tensor,
    up: tl.tensor,
    y: tl.tensor,
    gate_out: tl.tensor,
    up_out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    ACTIVATION: tl.constexpr,
    ROUNDED: tl.constexpr,
    KEEP: tl.constexpr,
    BACKWARD: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    if PARTS > 1:
        left, right = halves_of(gate)
        left_up, right_up = halves_of(up)
        more: tl.constexpr = PARTS // 2
        _finish_gated(left, left_up, y, gate_out, up_out, m, n, ACTIVATION, ROUNDED, KEEP, BACKWARD, more)
        n += left.shape[1]
        _finish_gated(right, right_up, y, gate_out, up_out, m, n, ACTIVATION, ROUNDED, KEEP, BACKWARD, more)
    else:
        if ROUNDED:
            gate, up = gate.to(y.dtype).to(tl.float32), up.to(y.dtype).to(tl.float32)
        if BACKWARD:
            dy = y.load([m, n]).to(tl.float32)
            gate_out.store([m, n], (dy * up * slope(gate, ACTIVATION)).to(y.dtype))
            up_out.store([m, n], (dy * activated(gate, ACTIVATION, y.dtype)).to(y.dtype))
        else:
            if KEEP:
                gate_out.store([m, n], gate.to(y.dtype))
                up_out.store([m, n], up.to(y.dtype))
            y.store([m, n], (activated(gate, ACTIVATION, y.dtype) * up).to(y.dtype))


@jit
def _gated_tiles_kernel(
    y: tl.tensor,
    gate_out: tl.tensor,
    up_out: tl.tensor,
    x: tl.tensor,
    weights: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    programs: tl.tensor,
    X_TURNED: tl.constexpr,
    UP_FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROUNDED: tl.constexpr,
    KEEP: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Every ``programs``-th tile of what `reference_kernels.linear.gated.gated` computes. Both ``weights`` are one
    tensor ``(2, N, K)``, so that a tile of either is half of one operand: instructions then have the full width."""
    blocks_m, blocks_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), blocks_m * blocks_n, programs, flatten=True):
        block_m, block_n = grouped(tile, blocks_m, blocks_n, GROUP)
        m, n = block_m * BLOCK_M, block_n * BLOCK_N
        total = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            both = tl.reshape(weights.load([0, n, k]), [2 * BLOCK_N, BLOCK_K])
            total = tl.dot(block_of(x, m, k, X_TURNED), tl.trans(both), total)
        gate, up = halves_of(total)
        if UP_FIRST:
            gate, up = up, gate
        _finish_gated(gate, up, y, gate_out, up_out, m, n, ACTIVATION, ROUNDED, KEEP, BACKWARD, PARTS)


@jit
def _finish_plain(total: tl.tensor, y: tl.tensor, m: tl.tensor, n: tl.tensor, PARTS: tl.constexpr) -> None:
    if PARTS > 1:
        left, right = halves_of(total)
        more: tl.constexpr = PARTS // 2
        _finish_plain(left, y, m, n, more)
        n += left.shape[1]
        _finish_plain(right, y, m, n, more)
    else:
        y.store([m, n], total.to(y.dtype))


@jit
def _summed_tiles_kernel(
    y: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    first_weight: tl.tensor,
    second_weight: tl.tensor,
    third_weight: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    first_K: tl.tensor,
    second_K: tl.tensor,
    third_K: tl.tensor,
    programs: tl.tensor,
    FIRST_TURNED: tl.constexpr,
    FIRST_WEIGHT_TURNED: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Every ``programs``-th tile of ``y``: the sum of two or three products, turned as the first, one after the other
    in one loop. A step chooses between descriptors, so that the loads of a product are under way before the last one
    has ended."""
    blocks_m, blocks_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    one = tl.cdiv(first_K, BLOCK_K)
    two = one + tl.cdiv(second_K, BLOCK_K)
    steps = two
    if COUNT > 2:
        steps += tl.cdiv(third_K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), blocks_m * blocks_n, programs, flatten=True):
        block_m, block_n = grouped(tile, blocks_m, blocks_n, GROUP)
        m, n = block_m * BLOCK_M, block_n * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(steps):
            x, weight, at = first, first_weight, step
            if step >= one:
                x, weight, at = second, second_weight, step - one
            if COUNT > 2:
                if step >= two:
                    x, weight, at = third, third_weight, step - two
            k = at * BLOCK_K
            rows = block_of(x, m, k, FIRST_TURNED)
            total = tl.dot(rows, tl.trans(block_of(weight, n, k, FIRST_WEIGHT_TURNED)), total)
        _finish_plain(total, y, m, n, PARTS)


@dataclass(frozen=True, slots=True)
class Described:
    """A matrix for a kernel, and whether it is described as its transposed."""

    matrix: Any
    turned: bool
    fixed: bool = False  # the kernel has no word for turned


def described(
    base: torch.Tensor, shape: tuple[int, int], strides: tuple[int, int], block: tuple[int, int]
) -> Described | None:
    """A matrix at the address of ``base``, whose rows or columns lie one after the other; ``None`` for others."""
    (rows, columns), (row, column) = shape, strides
    turned = column != 1
    if turned:
        shape, strides, block = (columns, rows), (column, row), (block[1], block[0])
    if shape[0] == 1:  # there is no next one, and Rows gives it no place
        strides = (-(-shape[1] // _ALIGNED) * _ALIGNED, strides[1])
    apart = strides[0] * base.itemsize
    if strides[1] != 1 or strides[0] < shape[1] or apart % _ALIGNED or base.data_ptr() % _ALIGNED:
        return None
    if min(shape) < 1 or max(shape) > _LARGEST:
        return None
    return Described(TensorDescriptor(base, list(shape), list(strides), list(block)), turned)


def by_rows(rows: Rows, tile: MatmulTile) -> Described | None:
    """The first operand of ``rows``."""
    strides = rows.strides[0]
    if rows.sizes[1:] != (1, 1):
        return None
    return described(rows.tensors[0], (rows.count, rows.width), (strides[0], strides[3]), (tile.m, tile.k))


def matrix_of(t: torch.Tensor, block: tuple[int, int]) -> Described | None:
    return described(t, (t.shape[0], t.shape[1]), (t.stride(0), t.stride(1)), block)


def pair_of(first: torch.Tensor, second: torch.Tensor, block: tuple[int, int]) -> Described | None:
    """Two matrices of one shape as ``(2, rows, columns)`` from the lower address on, as far apart as they lie, which
    need not be in one tensor; interpreted it has to be, since there an access is held to the storage of its base."""
    one = matrix_of(first, block)
    if INTERPRETED and first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return None
    apart = abs(second.data_ptr() - first.data_ptr())
    if one is None or one.turned or second.stride() != first.stride() or apart == 0 or apart % _ALIGNED:
        return None
    if apart >= _FURTHEST:
        return None
    base = min(first, second, key=torch.Tensor.data_ptr)
    shape, strides = [2, *one.matrix.shape], [apart // first.itemsize, *one.matrix.strides]
    return Described(TensorDescriptor(base, shape, strides, [2, *block]), False, fixed=True)


def alike(names: Sequence[str], found: Sequence[Described | None]) -> dict[str, Described | None]:
    """Operands for which a kernel has one word for turned, the first's: ``None`` unless all are turned or none is."""
    known = [each for each in found if each is not None]
    if len(known) < len(found) or len({each.turned for each in known}) > 1:
        return dict.fromkeys(names)
    first, *others = known
    return {names[0]: first} | {n: replace(each, fixed=True) for n, each in zip(names[1:], others, strict=True)}


def result_of(y: torch.Tensor, rows: int, columns: int, tile: MatmulTile) -> Described | None:
    """Contiguous ``y`` as ``rows`` of ``columns``, which a kernel stores in parts."""
    found = described(y, (rows, columns), (columns, 1), (tile.m, tile.n // tile.parts))
    return None if found is None or found.turned else replace(found, fixed=True)


def _programs(tiles: int, tile: MatmulTile, device: torch.device) -> int:
    """As many as the multiprocessors hold at a time, or as there are tiles."""
    # Interpreted, two, so that small cases have programs of several tiles; but no program of thousands, one by one.
    on_gpu = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else max(2, tiles // 64)
    return min(tiles, tile.resident * processors)


def launched(
    kernel: Any,
    operands: dict[str, Described | None],
    sizes: dict[str, int],
    tile: MatmulTile,
    device: torch.device,
    **others: Any,
) -> bool:
    """Launch, unless an operand has no descriptor: whether it was. ``sizes`` has ``M`` and each result's ``N``."""
    if None in operands.values():
        return False
    found = {name: each for name, each in operands.items() if each is not None}
    blocks = sum(triton.cdiv(size, tile.n) for name, size in sizes.items() if name.endswith("N"))
    programs = _programs(triton.cdiv(sizes["M"], tile.m) * blocks, tile, device)
    with placed(device):
        kernel[(programs,)](
            **{name: each.matrix for name, each in found.items()},
            **sizes,
            **{f"{name.upper()}_TURNED": each.turned for name, each in found.items() if not each.fixed},
            **others,
            programs=programs,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            GROUP=tile.group,
            PARTS=tile.parts,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return True


def linear_by_tiles(
    y: torch.Tensor,
    rows: Rows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    tile: MatmulTile,
) -> bool:
    """Fill contiguous ``y`` ``(*batch, n)`` with ``activation(x @ weight.T + bias)``, where the layouts have
    descriptors: whether they have."""
    N, K = weight.shape
    operands = {
        "y": result_of(y, rows.count, N, tile),
        "x": by_rows(rows, tile),
        "weight": matrix_of(weight, (tile.n, tile.k)),
    }
    return launched(
        _linear_tiles_kernel,
        operands,
        {"M": rows.count, "N": N, "K": K},
        tile,
        y.device,
        bias_ptr=y if bias is None else bias,
        bias_step=1 if bias is None else bias.stride(0),
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
    )


def gated_by_tiles(
    y: torch.Tensor,
    halves: tuple[torch.Tensor, torch.Tensor],
    rows: Rows,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    tile: MatmulTile,
    **constants: Any,
) -> bool:
    """What `reference_kernels.linear.gated.gated` does, where the layouts have descriptors: whether they have."""
    N, K = gate_weight.shape
    if (both := pair_of(gate_weight, up_weight, (tile.n, tile.k))) is None:
        return False
    used = constants["KEEP"] or constants["BACKWARD"]
    gate_out, up_out = (result_of(half if used else y, rows.count, N, tile) for half in halves)
    operands = {
        "y": result_of(y, rows.count, N, tile),
        "gate_out": gate_out,
        "up_out": up_out,
        "x": by_rows(rows, tile),
        "weights": both,
    }
    sizes = {"M": rows.count, "N": N, "K": K}
    first = up_weight.data_ptr() < gate_weight.data_ptr()
    return launched(_gated_tiles_kernel, operands, sizes, tile, y.device, UP_FIRST=first, **constants)


def summed_by_tiles(
    y: torch.Tensor, upstreams: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], tile: MatmulTile
) -> bool:
    """Fill contiguous ``y`` ``(m, n)`` with the sum of ``upstream @ weight`` over two or three pairs, ``(m, k)`` and
    ``(k, n)``, where the layouts have descriptors, all of them turned or none: whether they have."""
    names = "first", "second", "third"
    spare = 3 - len(weights)
    x = [matrix_of(each, (tile.m, tile.k)) for each in upstreams]
    turned = [matrix_of(each.t(), (tile.n, tile.k)) for each in weights]
    operands = {"y": result_of(y, y.shape[0], y.shape[1], tile)}
    for kind, found in (("", x), ("_weight", turned)):
        operands |= alike([f"{name}{kind}" for name in names], found + found[:1] * spare)
    depths = [len(weight) for weight in weights] + [0] * spare
    sizes = {"M": y.shape[0], "N": y.shape[1], **{f"{name}_K": each for name, each in zip(names, depths, strict=True)}}
    return launched(_summed_tiles_kernel, operands, sizes, tile, y.device, COUNT=len(weights))
