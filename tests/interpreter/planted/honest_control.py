"""Kernels in which nothing is wrong: programs that part ways, and what they choose between."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.interpreter.planted.model import Memory, Pairs, honest


@triton.jit
def one_name_kernel(x, out, n):
    pid = tl.program_id(0)
    if pid >= n:
        return
    total = 0.0
    for k in range(pid + 1):
        part = tl.load(x + k * 8 + tl.arange(0, 8))
        total += tl.sum(part)
    for k in range(2 * pid.to(tl.int64)):
        part = tl.load(x + k * 4 + tl.arange(0, 4))
        total += tl.sum(part)
    if pid % 2 == 1:
        tile = tl.make_tensor_descriptor(x, [8, 16], [16, 1], [2, 16])
        total += tl.sum(tile.load([pid, 0]))
    if pid % 3 == 1:
        tile = tl.make_tensor_descriptor(x, [128], [1], [16])
        part = total + tl.sum(tile.load([4 * pid]))
        tl.store(out + pid, part)
        return
    tl.store(out + pid, total)


@honest
def one_name_for_blocks_of_several_shapes(memory: Memory) -> Pairs:
    """Compilers forget what one branch or one loop has assigned: the next may give the name another type."""
    x, out = memory.range(8, 16, dtype=torch.float32), memory.zeros(6)
    one_name_kernel[(8,)](x, out, 6)
    flat, want = x.reshape(-1), []
    for p in range(6):
        total = flat[: 8 * (p + 1)].sum() + flat[: 8 * p].sum()
        total += x[p : p + 2].sum() if p % 2 == 1 else 0
        want.append(total + flat[4 * p : 4 * p + 16].sum() if p % 3 == 1 else total)
    return [(out, torch.stack(want))]


@triton.jit
def padding_kernel(zeros, nans, out, R: tl.constexpr):
    source = zeros
    if tl.program_id(0) % 2 == 1:
        source = nans
    target = tl.make_tensor_descriptor(out + tl.program_id(0) * R * 16, [R, 16], [16, 1], [R, 16])
    target.store([0, 0], source.load([R, 0]))


@honest
def descriptors_of_different_padding(memory: Memory) -> Pairs:
    """Of what is outside, the descriptor that a program has chosen decides."""
    x, y, out = memory.range(6, 16), memory.range(7, 16), memory.zeros(4, 4, 16)
    shapes = (x, 6, "zero"), (y, 7, "nan")
    given = [TensorDescriptor(t, [rows, 16], [16, 1], [4, 16], padding=padding) for t, rows, padding in shapes]
    padding_kernel[(4,)](*given, out, R=4)
    want = torch.zeros(4, 4, 16)
    want[1::2] = float("nan")
    want[0::2, :2], want[1::2, :3] = x[4:], y[4:]
    return [(out, want)]


@triton.jit
def joined_kernel(x, y, out, total):
    i = tl.arange(0, 8)
    both = tl.interleave(x + i, y + i)
    tl.store(out + tl.arange(0, 16), tl.load(both))
    left, right = tl.split(tl.join(x + i, y + i))
    all_of_them = tl.cat(left, right, can_reorder=True)
    tl.store(total, tl.sum(tl.load(all_of_them)))


@honest
def pointers_joined_and_concatenated(memory: Memory) -> Pairs:
    x, y, out, total = memory.range(8), memory.range(8), memory.zeros(16), memory.zeros(1)
    joined_kernel[(1,)](x, y, out, total)
    return [(out, torch.stack([x, y], 1).reshape(-1)), (total, (x + y).sum(0, keepdim=True))]


@triton.jit
def ping_pong_kernel(first, second, out, N: tl.constexpr):
    pid = tl.program_id(0)
    one = tl.make_tensor_descriptor(first, [N, 16], [16, 1], [1, 16])
    other = tl.make_tensor_descriptor(second, [N, 16], [16, 1], [1, 16])
    total = tl.zeros([1, 16], tl.float32)
    row = pid
    while tl.condition(row < N, disable_licm=True):
        total += one.load([row, 0])
        if row % 2 == pid % 2:
            one, other = other, one
        row += pid + 1
    tl.store(out + pid * 16 + tl.arange(0, 16)[None, :], total)


@honest
def descriptors_swapped_by_some_programs(memory: Memory) -> Pairs:
    """In a loop that they leave at different times."""
    x, y, out = memory.range(7, 16), memory.range(7, 16), memory.zeros(3, 16)
    y.mul_(100)
    ping_pong_kernel[(3,)](x, y, out, N=7)
    return [(out, torch.stack([_swapped(x, y, pid) for pid in range(3)]))]


def _swapped(x: torch.Tensor, y: torch.Tensor, pid: int) -> torch.Tensor:
    total = torch.zeros(16)
    for row in range(pid, 7, pid + 1):
        total += x[row]
        if row % 2 == pid % 2:
            x, y = y, x
    return total


@triton.jit
def chosen_number(condition):
    if condition:
        return -7
    return -9


@triton.jit
def numbers_kernel(out, n):
    number: tl.int32 = -7
    tl.store(out, number // 2)
    tl.store(out + 1, (-7 if n > 0 else 5) // 2)
    tl.store(out + 2, chosen_number(n > 0) // 2)
    tl.store(out + 3, (-7 if n > 0 else 5).to(tl.int64) % 4)
    tl.store(out + 4, chosen_number(n > 0).to(tl.int64) % 4)


@honest
def numbers_that_a_compiler_makes_tensors(memory: Memory) -> Pairs:
    """Their quotients are cut off, as C's are, where Python's are rounded down."""
    out = memory.zeros(5, dtype=torch.int32)
    numbers_kernel[(1,)](out, 3)
    return [(out, torch.tensor([-3, -3, -3, -3, -3], dtype=torch.int32))]


@triton.jit
def reduce_kernel(x, sums, least, most, rows):
    at = [tl.program_id(0) % 2 * 4, 0]
    tile = tl.make_tensor_descriptor(x, [rows, 16], [16, 1], [4, 16]).load(at)
    tl.make_tensor_descriptor(sums, [rows, 16], [16, 1], [4, 16]).atomic_add(at, tile)
    if tl.program_id(0) > 0:
        tl.make_tensor_descriptor(least, [4, 16], [16, 1], [4, 16]).atomic_min([0, 0], tile)
        tl.make_tensor_descriptor(most, [4, 16], [16, 1], [4, 16]).atomic_max([0, 0], tile)


@honest
def atomics_through_descriptors(memory: Memory) -> Pairs:
    """Rows past the end are left out of a tensor, and are zeros of the tile that was loaded."""
    x = memory.range(6, 16, dtype=torch.int32)
    x[::2] *= -1
    sums, least, most = memory.zeros(6, 16, dtype=torch.int32), *memory.zeros(2, 4, 16, dtype=torch.int32)
    reduce_kernel[(4,)](x, sums, least, most, 6)
    tiles = torch.nn.functional.pad(x, (0, 0, 0, 2)).reshape(2, 4, 16)
    return [(sums, 2 * x), (least, tiles.amin(0).clamp(max=0)), (most, tiles.amax(0).clamp(min=0))]


@triton.jit
def locked_kernel(x, y, lock):
    pid = tl.program_id(0)
    tl.store(x + pid, tl.load(x + pid) + 1)
    tl.store(y + pid, tl.load(y + pid) + 1)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.atomic_xchg(lock, 0)


@honest
def storages_at_one_address(memory: Memory) -> Pairs:
    """numpy's views of one array: a launch that has to run again serially finds both as they were."""
    numbers, lock = np.zeros(16, np.float32), memory.zeros(1, dtype=torch.int32)
    locked_kernel[(4,)](torch.from_numpy(numbers[:8]), torch.from_numpy(numbers)[8:], lock)
    locked_kernel[(4,)](torch.from_numpy(numbers), torch.from_numpy(numbers[:4]), lock)
    want = torch.zeros(16)
    want[:4], want[8:12] = 3, 1
    return [(torch.from_numpy(numbers), want)]


@triton.jit
def bytes_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    second = (x.to(tl.pointer_type(tl.int8)) + 4).to(tl.pointer_type(tl.float32))
    third = (x.to(tl.int64) + 8).to(tl.pointer_type(tl.float32))
    tl.store(out + i, tl.load(second + i) + tl.load(third + i))


@honest
def addresses_counted_in_bytes(memory: Memory) -> Pairs:
    x, out = memory.range(10), memory.zeros(8)
    bytes_kernel[(1,)](x, out, BLOCK=8)
    return [(out, x[1:9] + x[2:10])]
