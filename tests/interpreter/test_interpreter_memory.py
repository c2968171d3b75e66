"""Loads, stores and atomics of interpreted kernels."""

from __future__ import annotations

import contextlib

import pytest
import torch

from pytest_fusion import interpreter
from pytest_fusion.interpreter.memory.undefined_lanes import judged_lanes, masked_fill

interpreter.enable()
triton = pytest.importorskip("triton")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

tl = triton.language
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])


@triton.jit
def masked_kernel(x, out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i, mask=i < n))
    tl.store(out + N, tl.load(x, mask=n > 100, other=0.0))
    tl.store(out + N + 1, tl.load(x + 1, mask=n < 100))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_a_masked_float_without_other_is_poison(dtype: torch.dtype) -> None:
    """NaN, far above 0 and far below, in turn: a maximum passes over NaN, a minimum over what is large."""
    x, out = torch.ones(16).to(dtype), torch.empty(18, dtype=dtype)
    masked_kernel[(1,)](x, out, 5, N=16)
    wide = out.float()
    assert wide[:5].eq(1).all()
    assert wide[6:16:3].isnan().all()
    assert wide[7:16:3].gt(200).all()
    assert wide[5:16:3].lt(-200).all()
    assert wide[16:].tolist() == [0, 1]


def test_a_masked_integer_without_other_is_no_index() -> None:
    """Masked-off int32 elements are 0x7F7F7F7F or far below 0; of uint8 they are 127 and 0."""
    out, bytes_out = torch.empty(18, dtype=torch.int32), torch.empty(18, dtype=torch.uint8)
    masked_kernel[(1,)](torch.ones(16, dtype=torch.int32), out, 5, N=16)
    masked_kernel[(1,)](torch.ones(16, dtype=torch.uint8), bytes_out, 5, N=16)
    assert out[6:16:3].eq(0x7F7F7F7F).all()
    assert out[5:16:3].lt(-1e9).all()
    assert bytes_out[5:16].tolist() == [0, 127, 127] * 3 + [0, 127]


@triton.jit
def masked_scalar_kernel(x, out, n):
    tl.store(out, tl.load(x, mask=n > 0))


def test_a_masked_number_that_a_loop_may_count_to_is_small() -> None:
    """A loop to 0x7F7F7F7F would be taken for one that never ends."""
    out = torch.zeros(1, dtype=torch.int32)
    masked_scalar_kernel[(1,)](torch.ones(1, dtype=torch.int32), out, 0)
    assert out.item() == 61


def test_where_results_are_judged_they_are_zero() -> None:
    """That is what NVIDIA's code has there today; an outer ``masked_fill`` decides, and lines are noted either way."""
    out = torch.empty(18)
    for fill, zero in ((None, True), ("zero", True), ("poison", False)):
        with masked_fill(fill) if fill else contextlib.nullcontext(), judged_lanes() as met:
            masked_kernel[(1,)](torch.ones(16), out, 5, N=16)
        assert bool(out[5:16].eq(0).all()) == zero
        assert [line.code for line in met] == ["tl.store(out + i, tl.load(x + i, mask=i < n))"]


@triton.jit
def atomic_kernel(x, out, old, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(old + i, tl.atomic_add(out + i % 4, tl.load(x + i), mask=i < N - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_atomic_add_sees_its_own_collisions(dtype: torch.dtype) -> None:
    """Eight elements add to each address, one is masked off; each sees what the one before it left."""
    x, out, old = torch.ones(32, dtype=dtype), torch.zeros(4, dtype=dtype), torch.empty(32, dtype=dtype)
    atomic_kernel[(1,)](x, out, old, N=32)
    assert out.tolist() == [8, 8, 8, 7]
    assert old[:4].tolist() == [0, 0, 0, 0]
    assert old[24:31].tolist() == [6, 6, 6, 6, 7, 7, 7]


@triton.jit
def exchange_kernel(out, lock, short):
    tl.store(out, tl.atomic_cas(lock, 0, 1).to(tl.float32))
    tl.store(out + 1, tl.atomic_cas(lock, 0, 5).to(tl.float32))
    tl.atomic_max(out + 2, 3.0)
    tl.atomic_min(out + 3, -2.0)
    tl.atomic_or(lock, 6)
    two = tl.full([], 2.0, tl.float32).to(short.dtype.element_ty)
    tl.store(out + 4, tl.atomic_xchg(short, two).to(tl.float32))
    tl.store(out + 5, tl.atomic_cas(short, two, two + 1.0).to(tl.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_atomics(dtype: torch.dtype) -> None:
    """Compare-and-swap, exchange, or, and float max and min do what they say."""
    out, lock, short = torch.zeros(6), torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=dtype)
    exchange_kernel[(1,)](out, lock, short)
    assert out.tolist() == [0, 1, 3, -2, 1, 2]
    assert lock.item() == 7
    assert short.item() == 3


@triton.jit
def device_descriptor_kernel(x, out, M, N, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [BM, BN])
    target = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BM, BN])
    target.store([0, 0], source.load([0, 0]) * 2)


@triton.jit
def host_descriptor_kernel(source, target):
    target.store([0, 0], source.load([0, 0]) * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor_descriptors(dtype: torch.dtype) -> None:
    """Descriptors made in the kernel and on the host load, pad and store in both dtypes."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    x = torch.randn(6, 16).to(dtype)
    made, given = torch.zeros_like(x), torch.zeros_like(x)
    device_descriptor_kernel[(1,)](x, made, 6, 16, BM=8, BN=16)
    pair = TensorDescriptor.from_tensor(x, [8, 16]), TensorDescriptor.from_tensor(given, [8, 16])
    host_descriptor_kernel[(1,)](*pair)
    assert torch.equal(made, x * 2)
    assert torch.equal(given, x * 2)


def test_a_descriptor_that_hardware_refuses_is_told_in_one_line() -> None:
    """Rows of 20 bytes: the sentence, kernel and program, and nothing of how it was asked."""
    error = pytest.importorskip("triton.runtime.errors").InterpreterError
    with pytest.raises(error) as caught:
        device_descriptor_kernel[(1,)](torch.ones(4, 5), torch.ones(4, 5), 4, 5, BM=4, BN=4)
    where = "(kernel device_descriptor_kernel, program (0, 0, 0) of (1, 1, 1))"
    assert str(caught.value) == f"AssertionError: stride must be 16-byte aligned {where}"


@triton.jit
def block_pointer_kernel(x, out, M, N, BM: tl.constexpr, BN: tl.constexpr, PAD: tl.constexpr):
    source = tl.make_block_ptr(x, (M, N), (N, 1), (0, 0), (BM, BN), (1, 0))
    target = tl.make_block_ptr(out, (BM, BN), (BN, 1), (0, 0), (BM, BN), (1, 0))
    tl.store(target, tl.load(source, boundary_check=(0, 1), padding_option=PAD) + 1)


@pytest.mark.skipif(VERSION >= (3, 8), reason="Triton 3.8 removed block pointers")
@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
@pytest.mark.parametrize(("padding", "edge"), [("zero", 1.0), ("nan", float("nan")), ("", 1.0)])
def test_block_pointers_pad_their_edges(padding: str, edge: float) -> None:
    """A block reaching over the edge is padded with zero or NaN in bfloat16; without padding with zero."""
    x, out = torch.ones(6, 13, dtype=torch.bfloat16), torch.zeros(8, 16, dtype=torch.bfloat16)
    block_pointer_kernel[(1,)](x, out, 6, 13, BM=8, BN=16, PAD=padding)
    assert out[:6, :13].eq(2).all()
    outside = torch.cat([out[6:].flatten(), out[:, 13:].flatten()]).float()
    assert torch.equal(outside, torch.full_like(outside, edge)) or outside.isnan().all() == (edge != edge)
