"""What interpreted kernels compute, in every dtype, against torch: bit for bit where torch rounds the same way."""

from __future__ import annotations

import warnings

import pytest
import torch

from pytest_fusion import interpreter

interpreter.enable()
triton = pytest.importorskip("triton")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

tl = triton.language
libdevice = pytest.importorskip("triton.language.extra.libdevice")
tanh = pytest.importorskip("triton.language.extra.cuda.libdevice").tanh
HALVES = [torch.float16, torch.bfloat16]


@triton.jit
def binary_kernel(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, a + b)
    tl.store(out + N + i, a - b)
    tl.store(out + 2 * N + i, a * b)
    tl.store(out + 3 * N + i, a / b)
    tl.store(out + 4 * N + i, tl.maximum(a, b))
    tl.store(out + 5 * N + i, tl.where(a < b, a, b))
    tl.store(out + 6 * N + i, a * 2.0 + 1)
    tl.store(out + 7 * N + i, tl.abs(-a))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_elementwise_arithmetic_is_torchs(dtype: torch.dtype) -> None:
    """Arithmetic, comparison, selection and scalars equal torch bit for bit in each float dtype."""
    x, y = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = torch.empty(512, dtype=dtype)
    binary_kernel[(1,)](x, y, out, N=64)
    rows = [x + y, x - y, x * y, x / y, torch.maximum(x, y), torch.minimum(x, y), x * 2 + 1, x.abs()]
    assert torch.equal(out, torch.cat(rows))


@triton.jit
def cast_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@pytest.mark.parametrize("source", [torch.float32, *HALVES])
@pytest.mark.parametrize("target", [torch.float32, *HALVES, torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_round_to_nearest_even(source: torch.dtype, target: torch.dtype) -> None:
    """.to() rounds as torch does for values within the target's range."""
    x = (torch.randn(256, generator=torch.Generator().manual_seed(1)) * 8).to(source)
    out = torch.empty(256, dtype=target)
    cast_kernel[(1,)](x, out, N=256)
    assert torch.equal(out.float(), x.to(target).float())


def test_float_to_int8_saturates_at_16_bits() -> None:
    """The compiled cast goes through cvt.rzi.s16: 300 wraps to 44 and 70000 to -1."""
    x = torch.tensor([300.7, -300.7, 70000.0, float("nan")])
    out = torch.empty(4, dtype=torch.int8)
    cast_kernel[(1,)](x, out, N=4)
    assert out.tolist() == [44, -44, -1, 0]


@triton.jit
def reduce_kernel(x, out, N: tl.constexpr, WHICH: tl.constexpr):
    value = tl.load(x + tl.arange(0, N))
    if WHICH == "sum":
        tl.store(out, tl.sum(value))
    elif WHICH == "max":
        tl.store(out, tl.max(value))
    elif WHICH == "min":
        tl.store(out, tl.min(value, axis=0))
    elif WHICH == "argmax":
        tl.store(out, tl.argmax(value, 0))
    elif WHICH == "argmin":
        tl.store(out, tl.argmin(value, axis=-1))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES, torch.int32, torch.int8])
@pytest.mark.parametrize("which", ["max", "min", "argmax", "argmin"])
def test_extremes_are_exact(dtype: torch.dtype, which: str) -> None:
    """max, min, argmax and argmin equal torch's; the left-most of equal values wins."""
    x = (torch.randn(64, generator=torch.Generator().manual_seed(2)) * 9).to(dtype)
    out = torch.empty(1, dtype=torch.int32 if which.startswith("arg") else dtype)
    reduce_kernel[(1,)](x, out, N=64, WHICH=which)
    expected = getattr(x, which)()
    assert (x[out.item()].item() == x[expected].item()) if which.startswith("arg") else out.item() == expected.item()


def test_argmax_takes_the_first_of_equals() -> None:
    """Ties go to the lowest index."""
    x = torch.tensor([0.0, 3.0, 1.0, 3.0])
    out = torch.empty(1, dtype=torch.int32)
    reduce_kernel[(1,)](x, out, N=4, WHICH="argmax")
    assert out.item() == 1


@pytest.mark.parametrize("which", ["max", "min"])
def test_extremes_skip_nan(which: str) -> None:
    """tl.max and tl.min return a number where there is one, as max.f32 on the device does."""
    x = torch.tensor([1.0, float("nan"), -2.0, 0.5])
    out = torch.empty(1)
    reduce_kernel[(1,)](x, out, N=4, WHICH=which)
    assert out.item() == {"max": 1.0, "min": -2.0}[which]
    reduce_kernel[(1,)](torch.full((4,), float("nan")), out, N=4, WHICH=which)
    assert out.isnan().item()


def test_a_bfloat16_sum_is_a_tree_of_bfloat16() -> None:
    """4096 ones sum to 4096: neither stuck at 256, nor the integer sum of bit patterns."""
    out = torch.empty(1, dtype=torch.bfloat16)
    reduce_kernel[(1,)](torch.ones(4096, dtype=torch.bfloat16), out, N=4096, WHICH="sum")
    assert out.item() == 4096
    small = torch.tensor([256.0, 1.0, 256.0, 1.0], dtype=torch.bfloat16)
    reduce_kernel[(1,)](small, out, N=4, WHICH="sum")
    assert out.item() in {512.0, 516.0}


def test_an_int8_sum_is_int32() -> None:
    """Small integers are summed as int32, as tl.sum documents."""
    out = torch.empty(1, dtype=torch.int32)
    reduce_kernel[(1,)](torch.full((64,), 100, dtype=torch.int8), out, N=64, WHICH="sum")
    assert out.item() == 6400


@triton.jit
def nan_kernel(x, y, out):
    a = tl.load(x)
    b = tl.load(y)
    tl.store(out, tl.maximum(a, b))
    tl.store(out + 1, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 2, tl.minimum(b, a))
    tl.store(out + 3, tl.clamp(a, -1.0, 1.0))
    tl.store(out + 4, tl.clamp(a, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL))


def test_maximum_propagates_nan_only_when_asked() -> None:
    """maximum and minimum drop a NaN by default; clamp makes it the lower bound."""
    out = torch.empty(5)
    nan_kernel[(1,)](torch.tensor([float("nan")]), torch.tensor([2.0]), out)
    assert [out[0].item(), out[2].item(), out[3].item()] == [2.0, 2.0, -1.0]
    assert out[1].isnan().item()
    assert out[4].isnan().item()


@triton.jit
def scan_kernel(x, out, N: tl.constexpr, REVERSE: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.cumsum(tl.load(x + i), 0, reverse=REVERSE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("reverse", [False, True])
def test_cumulative_sums(dtype: torch.dtype, reverse: bool) -> None:
    """cumsum runs both ways in each dtype, exactly where the sums are exact."""
    x = torch.randint(-3, 4, (32,), generator=torch.Generator().manual_seed(3)).to(dtype)
    out = torch.empty_like(x)
    scan_kernel[(1,)](x, out, N=32, REVERSE=reverse)
    expected = x.flip(0).cumsum(0).flip(0) if reverse else x.cumsum(0)
    assert torch.equal(out, expected.to(dtype))


@triton.jit
def recurrence(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def larger_by_branch(a, b):
    if a > b:
        result = a
    else:
        result = b
    return result


@triton.jit
def merged_moments(m1, s1, n1, m2, s2, n2):
    delta = m2 - m1
    n = n1 + n2
    share = n2 / n
    return m1 + delta * share, s1 + s2 + delta * delta * n1 * share, n


@triton.jit
def custom_kernel(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    _, h = tl.associative_scan((a, b), 0, recurrence)
    tl.store(out + i, h)
    mean, m2, count = tl.reduce((b, tl.zeros([N], tl.float32), tl.full([N], 1.0, tl.float32)), 0, merged_moments)
    tl.store(out + N, mean)
    tl.store(out + N + 1, m2 / count)
    tl.store(out + N + 2, tl.reduce(b, 0, larger_by_branch))


def test_custom_combine_functions() -> None:
    """A linear recurrence, Welford moments and a combine function with a branch give what one by one gives."""
    generator = torch.Generator().manual_seed(4)
    x, y = torch.rand(64, generator=generator), torch.randn(64, generator=generator)
    out = torch.empty(67)
    custom_kernel[(1,)](x, y, out, N=64)
    state, states = 0.0, []
    for a, b in zip(x.double().tolist(), y.double().tolist(), strict=True):
        state = state * a + b
        states.append(state)
    assert torch.allclose(out[:64].double(), torch.tensor(states, dtype=torch.float64), atol=1e-5)
    assert torch.allclose(out[64:66], torch.stack([y.mean(), y.var(unbiased=False)]), atol=1e-5)
    assert out[66] == y.max()


@triton.jit
def dot_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TO: tl.constexpr):
    i = tl.arange(0, M)[:, None]
    j = tl.arange(0, N)[None, :]
    k = tl.arange(0, K)
    left = tl.load(a + i * K + k[None, :])
    right = tl.load(b + k[:, None] * N + j)
    tl.store(out + i * N + j, tl.dot(left, right, out_dtype=TO))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_dot_in_every_dtype(dtype: torch.dtype) -> None:
    """tl.dot of narrow floats is exact up to float32 summation, and of int8 exact."""
    generator = torch.Generator().manual_seed(5)
    a = (torch.randn(16, 32, generator=generator) * 3).to(dtype)
    b = (torch.randn(32, 16, generator=generator) * 3).to(dtype)
    integer = dtype == torch.int8
    out = torch.empty(16, 16, dtype=torch.int32 if integer else torch.float32)
    dot_kernel[(1,)](a, b, out, M=16, N=16, K=32, TO=tl.int32 if integer else tl.float32)
    expected = a.double() @ b.double()
    assert (out.double() - expected).abs().max() <= (0 if integer else 1e-5) * (1 + expected.abs().max())


def test_a_tf32_dot_is_noted() -> None:
    """The default precision of a float32 dot is tf32 on the device; that it was not modelled is told."""
    a, out = torch.eye(16), torch.empty(16, 16)
    dot_kernel[(1,)](a, a, out, M=16, N=16, K=16, TO=tl.float32)
    assert any("tf32" in note for note in interpreter.notes())


@triton.jit
def library_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, libdevice.tanh(v))
    tl.store(out + N + i, tanh(v))
    tl.store(out + 2 * N + i, libdevice.rsqrt(tl.abs(v)))
    tl.store(out + 3 * N + i, tl.math.erf(v))
    tl.store(out + 4 * N + i, tl.extra.cuda.libdevice.pow(tl.abs(v), 2.5))
    tl.store(out + 5 * N + i, libdevice.isnan(v).to(tl.float32))
    tl.store(out + 6 * N + i, tl.rsqrt(tl.abs(v)))


def test_libdevice_by_every_way_of_importing_it() -> None:
    """libdevice works from the portable module, from CUDA's, by name and through tl.extra."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(6))
    out = torch.empty(7, 64)
    library_kernel[(1,)](x, out, N=64)
    wide = x.double()
    expected = [
        wide.tanh(),
        wide.tanh(),
        wide.abs().rsqrt(),
        wide.erf(),
        wide.abs() ** 2.5,
        wide * 0,
        wide.abs().rsqrt(),
    ]
    assert torch.allclose(out.double(), torch.stack(expected), rtol=2e-7, atol=0)


@triton.jit
def integer_kernel(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, a // b)
    tl.store(out + N + i, a % b)
    tl.store(out + 2 * N + i, a * b)
    tl.store(out + 3 * N + i, ~a)
    tl.store(out + 4 * N + i, tl.cdiv(a, b))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint32, torch.int64])
def test_integers_divide_like_c_and_wrap(dtype: torch.dtype) -> None:
    """Division truncates, remainders take the dividend's sign, products wrap and ~x works on unsigned."""
    generator = torch.Generator().manual_seed(7)
    signed = dtype in {torch.int32, torch.int64}
    x = torch.randint(-(2**31) if signed else 0, 100, (16,), generator=generator).to(dtype)
    y = torch.randint(1, 50, (16,), generator=generator).to(dtype)
    if signed:
        y[::2] = -y[::2]
    out = torch.empty(80, dtype=dtype)
    integer_kernel[(1,)](x, y, out, N=16)
    a, b = x.long(), y.long()
    quotients = torch.div(a, b, rounding_mode="trunc"), torch.fmod(a, b), a * b, ~a
    rounded_up = torch.div((a + b - 1).to(dtype).long(), b, rounding_mode="trunc")
    assert torch.equal(out, torch.cat([*quotients, rounded_up]).to(dtype))


@triton.jit
def warning_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, tl.exp(v * 1000.0) / (v - v) + tl.log(-v) + tl.sqrt(-v))
    tl.store(out + N + i, (i * 2147483647 + 2147483647 // (i + 1)).to(tl.float32))


def test_no_numpy_warning_leaks() -> None:
    """Overflow, division by zero and invalid operations are silent, as on the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = torch.empty(32)
        warning_kernel[(1,)](torch.arange(16.0), out, N=16)
    assert out[:16].isnan().all()


@triton.jit
def misc_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    first, second = tl.split(tl.reshape(v, [N // 2, 2]))
    tl.store(out + i, tl.interleave(second, first))
    tl.store(out + N + i, tl.softmax(v.to(tl.float32)))
    tl.store(out + 2 * N + i, tl.sigmoid(v.to(tl.float32)))
    tl.store(out + 3 * N + i, tl.gather(v, N - 1 - i, 0))
    tl.store(out + 4 * N + i, tl.histogram(i // 2, N).to(tl.float32))
    tl.store(out + 5 * N + i, tl.sort(v))
    tl.store(out + 6 * N + i, tl.full([N], 1.5, v.dtype) + tl.zeros([N], v.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_and_library_functions(dtype: torch.dtype) -> None:
    """split, interleave, gather, sort, histogram, softmax and constants work on bfloat16 as on float32."""
    x = torch.randn(32, generator=torch.Generator().manual_seed(8)).to(dtype)
    out = torch.empty(7, 32)
    misc_kernel[(1,)](x, out, N=32)
    wide = x.float()
    swapped = wide.view(16, 2).flip(1).reshape(-1)
    counts = torch.tensor([2.0] * 16 + [0.0] * 16)
    expected = [
        swapped,
        wide.softmax(0),
        wide.sigmoid(),
        wide.flip(0),
        counts,
        wide.sort().values,
        torch.full((32,), 1.5),
    ]
    assert torch.allclose(out, torch.stack(expected), rtol=1e-6, atol=1e-7)


@triton.jit
def cube_kernel(x, out):
    i = tl.arange(0, 4)[:, None, None]
    j = tl.arange(0, 8)[None, :, None]
    k = tl.arange(0, 16)[None, None, :]
    v = tl.load(x + i * 128 + j * 16 + k)
    tl.store(out + tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :], tl.sum(v, axis=1))
    tl.store(out + 64 + i * 8 + j, tl.max(v, axis=-1, keep_dims=True))
    tl.store(out + 96 + tl.arange(0, 16), tl.sum(tl.sum(tl.trans(v, 2, 0, 1), 2), 1))
    tl.store(out + 112, tl.sum(v))


def test_reductions_over_any_axis() -> None:
    """Reductions over a middle, a negative, the last and every axis, with dimensions kept or not."""
    x = torch.randint(-9, 9, (4, 8, 16), generator=torch.Generator().manual_seed(9)).float()
    out = torch.empty(113)
    cube_kernel[(1,)](x, out)
    expected = torch.cat([x.sum(1).flatten(), x.amax(-1).flatten(), x.sum((0, 1)), x.sum().view(1)])
    assert torch.equal(out, expected)


@triton.jit
def random_kernel(out, seed, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.rand(seed, i))
    tl.store(out + N + i, tl.randn(seed, i))


def test_random_numbers_are_uniform_and_normal() -> None:
    """Philox works on every supported version, whose 32-bit products must be unsigned."""
    out = torch.empty(2, 1024)
    random_kernel[(1,)](out, 42, N=1024)
    assert 0.45 < out[0].mean() < 0.55
    assert out[0].min() >= 0
    assert out[0].max() < 1
    assert abs(out[1].mean()) < 0.15
    assert 0.9 < out[1].std() < 1.1


@triton.jit
def builtin_kernel(x, out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, max(v, 0.0))
    tl.store(out + N + i, min(tl.load(x + min(i, n - 1)), 1.0))
    tl.store(out + 2 * N, max(N, 7) + min(n, 3).to(tl.float32))


@pytest.mark.filterwarnings("error")
def test_builtin_min_and_max_of_blocks() -> None:
    """Bare min and max are element by element on blocks, and plain numbers on compile-time values."""
    x, out = torch.randn(16, generator=torch.Generator().manual_seed(10)), torch.empty(33)
    builtin_kernel[(1,)](x, out, 5, N=16)
    clipped = x[torch.arange(16).clamp(max=4)].clamp(max=1)
    assert torch.equal(out, torch.cat([x.relu(), clipped, torch.tensor([19.0])]))


@triton.jit
def selu(x, alpha):
    if x > 0:
        result = x
    else:
        result = alpha * (tl.exp(x) - 1.0)
    return result


@triton.jit
def map_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, tl.map_elementwise(selu, v, tl.full([N], 2.0, tl.float32)))


def test_map_elementwise_calls_on_scalars() -> None:
    """A function that branches is called for each element."""
    x, out = torch.randn(16, generator=torch.Generator().manual_seed(11)), torch.empty(16)
    map_kernel[(1,)](x, out, N=16)
    assert torch.allclose(out, torch.where(x > 0, x, 2 * x.expm1()), atol=1e-6)


@triton.jit
def scaled_kernel(a, a_scale, b, b_scale, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, FP4: tl.constexpr):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    g = tl.arange(0, K // 32)
    right = tl.load(b + tl.arange(0, K)[:, None] * N + n[None, :])
    left_scale = tl.load(a_scale + m[:, None] * (K // 32) + g[None, :])
    right_scale = tl.load(b_scale + n[:, None] * (K // 32) + g[None, :])
    if FP4:
        left = tl.load(a + m[:, None] * (K // 2) + tl.arange(0, K // 2)[None, :])
        product = tl.dot_scaled(left, left_scale, "e2m1", right, right_scale, "e4m3")
    else:
        left = tl.load(a + m[:, None] * K + tl.arange(0, K)[None, :])
        product = tl.dot_scaled(left, left_scale, "e5m2", right, right_scale, "e4m3")
    tl.store(out + m[:, None] * N + n[None, :], product)


@pytest.mark.parametrize("fp4", [False, True])
def test_scaled_dot_decodes_float4_and_float8(fp4: bool) -> None:
    """dot_scaled multiplies decoded float4 or float8 values with their power-of-two scales, exactly."""
    generator = torch.Generator().manual_seed(12)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([table, -table])
    b = torch.randint(-4, 5, (64, 16), generator=generator).float().to(torch.float8_e4m3fn)
    scales = torch.randint(125, 130, (2, 16, 2), generator=generator, dtype=torch.uint8)
    if fp4:
        codes = torch.randint(0, 16, (16, 64), generator=generator, dtype=torch.uint8)
        a, left = codes[:, ::2] | (codes[:, 1::2] << 4), table[codes.long()]
    else:
        a = torch.randint(-4, 5, (16, 64), generator=generator).float().to(torch.float8_e5m2)
        left = a.float()
    out = torch.empty(16, 16)
    scaled_kernel[(1,)](a.contiguous(), scales[0], b, scales[1], out, M=16, N=16, K=64, FP4=fp4)
    factors = torch.exp2(scales.float() - 127).repeat_interleave(32, dim=-1)
    assert torch.equal(out, (left * factors[0]) @ (b.float() * factors[1].T))
