"""Kernels in which nothing is wrong: layouts, masks, indices and element types that a rash checker would accuse."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.interpreter.planted.model import Memory, Pairs, honest

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])


@triton.jit
def copy_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@honest
def masked_tails_of_every_width(memory: Memory) -> Pairs:
    pairs = []
    floats = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    for dtype in [torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, *floats]:
        x, out = memory.range(21, dtype=dtype), memory.zeros(21, dtype=dtype)
        copy_kernel[(2,)](x, out, 21, BLOCK=16)
        pairs.append((out, x))
    return pairs


@honest
def empty_grid(memory: Memory) -> Pairs:
    out = memory.zeros(4)
    copy_kernel[(0,)](torch.empty(0), out, 0, BLOCK=16)
    return [(out, torch.zeros(4))]


@honest
def tensors_without_elements(memory: Memory) -> Pairs:
    """Their address is null, and every lane is masked off."""
    out = torch.empty(0)
    copy_kernel[(1,)](torch.empty(0), out, 0, BLOCK=16)
    return [(out, torch.empty(0))]


@honest
def one_tensor_as_both_arguments(memory: Memory) -> Pairs:
    x = memory.range(21)
    copy_kernel[(2,)](x, x, 21, BLOCK=16)
    return [(x, torch.arange(1.0, 22.0))]


@honest
def neighbouring_slices_of_one_storage(memory: Memory) -> Pairs:
    base = memory.range(40)
    copy_kernel[(2,)](base[:20], base[20:], 20, BLOCK=16)
    return [(base[20:], torch.arange(1.0, 21.0))]


@triton.jit
def reversed_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + (n - 1) - i, mask=i < n), mask=i < n)


@honest
def reversed_by_negative_steps(memory: Memory) -> Pairs:
    """In the tail the masked-off lanes point before the start."""
    x, out = memory.range(21), memory.zeros(21)
    reversed_kernel[(2,)](x, out, 21, BLOCK=16)
    return [(out, x.flip(0))]


@triton.jit
def clamped_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    clamped = tl.load(x + tl.where(i < n, i, 0))
    wrapped = tl.load(x + i % n)
    tl.store(out + i, clamped + wrapped, mask=i < n)


@honest
def indices_clamped_and_wrapped(memory: Memory) -> Pairs:
    x, out = memory.range(21), memory.zeros(21)
    clamped_kernel[(2,)](x, out, 21, BLOCK=16)
    return [(out, 2 * x)]


@triton.jit
def wild_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    far = i.to(tl.int64) * 1_000_000_000_000
    value = tl.load(x - far, mask=i < 1, other=0.0)
    tl.store(out + far, value + 1, mask=i < 1)
    tl.store(out - 1, 5.0, mask=n > 100)


@honest
def wild_addresses_masked_off(memory: Memory) -> Pairs:
    x, out = memory.range(4), memory.zeros(4)
    wild_kernel[(1,)](x, out, 4, BLOCK=16)
    return [(out, torch.tensor([2.0, 0, 0, 0]))]


@triton.jit
def there_and_back_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x += 1_000_000
    out -= 1_000_000
    for _ in range(3):
        x -= 500_000
        out += 500_000
    x += 500_000
    tl.store(out - 500_000 + i, tl.load(x + i, mask=i < n), mask=i < n)


@honest
def pointer_moved_far_away_and_back(memory: Memory) -> Pairs:
    x, out = memory.range(10), memory.zeros(10)
    there_and_back_kernel[(1,)](x, out, 10, BLOCK=16)
    return [(out, x)]


@triton.jit
def strided_kernel(x, out, xr, xc, outr, outc, rows, columns, R: tl.constexpr, C: tl.constexpr):
    r = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    c = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    mask = (r < rows) & (c < columns)
    tl.store(out + r * outr + c * outc, tl.load(x + r * xr + c * xc, mask=mask), mask=mask)


def _strided(x: torch.Tensor, out: torch.Tensor) -> Pairs:
    strided_kernel[(2, 2)](x, out, *x.stride(), *out.stride(), *x.shape, R=8, C=8)
    return [(out, x)]


@honest
def store_to_a_transposed_view(memory: Memory) -> Pairs:
    return _strided(memory.range(10, 13), memory.zeros(10, 13, strides=(1, 10)))


@honest
def store_to_a_slice_of_rows_and_columns(memory: Memory) -> Pairs:
    return _strided(memory.range(10, 13), memory.zeros(10, 13, strides=(40, 2), before=7, after=9))


@honest
def load_of_an_expanded_view(memory: Memory) -> Pairs:
    x = memory.like(torch.arange(13.0).expand(10, 13), strides=(0, 1))
    return _strided(x, memory.zeros(10, 13))


@honest
def store_of_equal_rows_to_an_expanded_view(memory: Memory) -> Pairs:
    """All rows are one row in memory, and all store the same to it."""
    x = memory.like(torch.arange(13.0).expand(10, 13), strides=(0, 1))
    out = memory.like(torch.zeros(1, 13).expand(10, 13), strides=(0, 1))
    return _strided(x, out)


@honest
def overlapping_windows_of_the_input(memory: Memory) -> Pairs:
    base = memory.range(22)
    return _strided(base.as_strided((10, 13), (1, 1)), memory.zeros(10, 13))


@honest
def real_parts_of_complex_numbers(memory: Memory) -> Pairs:
    out = torch.zeros(10, 13, dtype=torch.complex64)
    _strided(memory.range(10, 13), torch.view_as_real(out)[..., 0])
    return [(out.real, torch.arange(1.0, 131.0).reshape(10, 13)), (out.imag, torch.zeros(10, 13))]


@triton.jit
def padded_rows_kernel(x, out, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + c)
    tl.store(out + row, tl.sum(tl.where(c < columns, value, 0)))


@honest
def row_padding_read_and_thrown_away(memory: Memory) -> Pairs:
    x = memory.range(4, 13, dtype=torch.int32, strides=(16, 1), after=3)
    out = memory.zeros(4, dtype=torch.int32)
    padded_rows_kernel[(4,)](x, out, 16, 13, BLOCK=16)
    return [(out, x.sum(1).int())]


@triton.jit
def pad_kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.store(out + row * BLOCK + c, tl.load(x + row * columns + c, mask=c < columns, other=0.0))


@honest
def padding_filled_by_the_kernel(memory: Memory) -> Pairs:
    """The launcher passes the whole padded buffer and returns a view of it."""
    x, out = memory.range(4, 13), torch.empty(4, 16)
    pad_kernel[(4,)](x, out, 13, BLOCK=16)
    return [(out[:, :13], x), (out[:, 13:], torch.zeros(4, 3))]


@triton.jit
def tables_kernel(sources, targets, sizes, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    source = tl.load(sources + pid).to(tl.pointer_type(tl.float16))
    target = tl.load(targets + pid).to(tl.pointer_type(tl.float16))
    i = tl.arange(0, BLOCK)
    mask = i < tl.load(sizes + pid)
    tl.store(target + i, tl.load(source + i, mask=mask) * 2, mask=mask)


@honest
def tables_of_pointers(memory: Memory) -> Pairs:
    sources = [memory.range(n, dtype=torch.float16) for n in (3, 16, 7)]
    targets = [torch.empty_like(x) for x in sources]
    addresses = [torch.tensor([t.data_ptr() for t in tensors]) for tensors in (sources, targets)]
    tables_kernel[(3,)](*addresses, torch.tensor([3, 16, 7], dtype=torch.int32), BLOCK=16)
    return [(target, 2 * source) for source, target in zip(sources, targets, strict=True)]


@triton.jit
def early_kernel(x, out, n, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    if start >= n:
        return
    i = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        tl.store(out + i, tl.load(x + i))
        return
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@honest
def programs_that_return_early(memory: Memory) -> Pairs:
    x, out = memory.range(37), memory.zeros(37)
    early_kernel[(6,)](x, out, 37, BLOCK=8)
    return [(out, x)]


@triton.jit
def descriptor_kernel(x, out, rows, columns, R: tl.constexpr, C: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [R, C])
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [R, C])
    at = [tl.program_id(0) * R, tl.program_id(1) * C]
    target.store(at, source.load(at))


@honest
def descriptors_over_the_edge(memory: Memory) -> Pairs:
    x, out = memory.range(5, 20), memory.zeros(5, 20)
    descriptor_kernel[(2, 2)](x, out, 5, 20, R=4, C=16)
    return [(out, x)]


@triton.jit
def host_descriptor_kernel(source, target, R: tl.constexpr):
    at = tl.program_id(0) * R
    target.store([at, 0], source.load([at, 0]))


@honest
def host_descriptors_of_padded_rows(memory: Memory) -> Pairs:
    x, out = memory.range(5, 13, strides=(16, 1)), memory.zeros(5, 13, strides=(16, 1))
    source, target = (TensorDescriptor.from_tensor(t, [4, 16]) for t in (x, out))
    host_descriptor_kernel[(2,)](source, target, R=4)
    return [(out, x)]


@triton.jit
def chosen_descriptor_kernel(first, second, third, first_out, second_out, third_out, R: tl.constexpr):
    source, target = first, first_out
    if tl.program_id(1) == 1:
        source, target = second, second_out
    if tl.program_id(1) == 2:
        source, target = third, third_out
    at = tl.program_id(0) * R
    target.store([at, 0], source.load([at, 0]))


@honest
def programs_that_choose_between_descriptors(memory: Memory) -> Pairs:
    """Of tensors that have nothing in common, not even how many rows they have."""
    given = [memory.range(rows, 13, strides=(16, 1)) for rows in (5, 8, 3)]
    outs = [memory.zeros(rows, 13, strides=(16, 1)) for rows in (5, 8, 3)]
    chosen_descriptor_kernel[(2, 3)](*(TensorDescriptor.from_tensor(t, [4, 16]) for t in (*given, *outs)), R=4)
    return list(zip(outs, given, strict=True))


@triton.jit
def block_pointer_kernel(x, out, rows, stride, R: tl.constexpr, C: tl.constexpr):
    source = tl.make_block_ptr(x, (rows, 13), (stride, 1), (0, 0), (R, C), (1, 0))
    target = tl.make_block_ptr(out, (rows, 13), (13, 1), (0, 0), (R, C), (1, 0))
    for _ in range(0, rows, R):
        tl.store(target, tl.load(source, boundary_check=(0, 1)), boundary_check=(0, 1))
        source = tl.advance(source, (R, 0))
        target = tl.advance(target, (R, 0))


if VERSION < (3, 8):  # which removed block pointers

    @honest
    def block_pointers_over_the_edge(memory: Memory) -> Pairs:
        x, out = memory.range(5, 13, strides=(14, 1)), memory.zeros(5, 13)
        block_pointer_kernel[(1,)](x, out, 5, 14, R=4, C=16)
        return [(out, x)]
