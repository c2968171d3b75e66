"""What kernels make of the values that arithmetic is usually wrong about, against PyTorch and Python's own integers."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_fusion import interpreter

interpreter.enable()
triton = pytest.importorskip("triton")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

from pytest_fusion.interpreter import interpreted  # noqa: E402 - the lane must be on before Triton is imported

tl = triton.language
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
NAN, INF = math.nan, math.inf
# Elements of a program; the values of a test are cut into this many and the rest is padded.
BLOCK = 8

INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(params=["batched", "serial"])
def launch(request: pytest.FixtureRequest):
    """Launches a kernel of two inputs with as many programs as it takes; returns its outputs, one row each."""

    def run(kernel, x: torch.Tensor, y: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
        count = x.numel()
        programs = triton.cdiv(count, BLOCK)
        padded = [torch.cat([t, t[:1].expand(programs * BLOCK - count)]).contiguous() for t in (x, y)]
        out = torch.zeros(rows, programs * BLOCK, dtype=dtype)
        with interpreted(executor=request.param, findings="raise") as session:
            kernel[(programs,)](*padded, out, programs * BLOCK, BLOCK=BLOCK)
        assert {record.executor for record in session.launches} == {request.param}
        return out[:, :count]

    return run


def pairs(values: list, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every value with every value."""
    x = torch.tensor(values, dtype=dtype)
    return x.repeat_interleave(len(values)), x.repeat(len(values))


def corners(dtype: torch.dtype) -> list[int]:
    ends = torch.iinfo(dtype)
    return sorted(
        {ends.min, ends.min + 1, ends.max, ends.max - 1, ends.max // 2, ends.max // 3, 0, 1, 2, 7}
        | ({-1, -2, -7} if ends.min < 0 else set())
    )


def wrapped(value: int, dtype: torch.dtype) -> int:
    """``value`` cut to the width of ``dtype``."""
    bits = torch.iinfo(dtype).bits
    value %= 1 << bits
    return value - (1 << bits) if torch.iinfo(dtype).min < 0 and value >> (bits - 1) else value


def same_floats(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal numbers with equal signs, zeros included, and NaN for NaN."""
    got, expected = got.double(), expected.double()
    numbers = ~expected.isnan()
    signs = torch.equal(got.signbit()[numbers], expected.signbit()[numbers])
    return signs and torch.equal(got.isnan(), expected.isnan()) and torch.equal(got[numbers], expected[numbers])


@triton.jit
def integer_kernel(x, y, out, rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, a + b)
    tl.store(out + rows + i, a - b)
    tl.store(out + 2 * rows + i, a * b)
    tl.store(out + 3 * rows + i, tl.minimum(a, b))
    tl.store(out + 4 * rows + i, tl.maximum(a, b))
    tl.store(out + 5 * rows + i, a & b)
    tl.store(out + 6 * rows + i, a ^ b)
    tl.store(out + 7 * rows + i, ~a)
    tl.store(out + 8 * rows + i, tl.where(a < b, a, b))
    tl.store(out + 9 * rows + i, tl.where(a >= b, a, b))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_and_compare_by_their_sign(launch, dtype: torch.dtype) -> None:
    """Sums, differences and products keep the low bits; order is that of the signed or unsigned number."""
    x, y = pairs(corners(dtype), dtype)
    got = launch(integer_kernel, x, y, 10, dtype).tolist()
    numbers = list(zip(x.tolist(), y.tolist(), strict=True))
    expected = [
        [wrapped(f(a, b), dtype) for a, b in numbers]
        for f in (
            lambda a, b: a + b,
            lambda a, b: a - b,
            lambda a, b: a * b,
            min,
            max,
            lambda a, b: a & b,
            lambda a, b: a ^ b,
            lambda a, b: ~a,
            min,
            max,
        )
    ]
    assert got == expected


@triton.jit
def division_kernel(x, y, out, rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, a // b)
    tl.store(out + rows + i, a % b)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_division_truncates_and_never_traps(launch, dtype: torch.dtype) -> None:
    """-7 // 2 is -3 with remainder -1; the lowest number by -1 wraps; by zero all bits are set."""
    x, y = pairs(corners(dtype), dtype)
    quotients, remainders = launch(division_kernel, x, y, 2, dtype).tolist()
    for a, b, quotient, remainder in zip(x.tolist(), y.tolist(), quotients, remainders, strict=True):
        if b == 0:
            assert (quotient, remainder) == (wrapped(-1, dtype), a)
            continue
        truncated = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        assert (quotient, remainder) == (wrapped(truncated, dtype), a - truncated * b), (a, b)


@triton.jit
def shift_kernel(x, y, out, rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, a << b)
    tl.store(out + rows + i, a >> b)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_shifts_follow_the_sign_of_the_left_operand(launch, dtype: torch.dtype) -> None:
    """>> repeats the sign bit of a signed number and brings in zeros for an unsigned one; << drops what falls out."""
    bits = torch.iinfo(dtype).bits
    by = [0, 1, 2, bits // 2, bits - 1]
    values = torch.tensor(corners(dtype), dtype=dtype)
    x, y = values.repeat_interleave(len(by)), torch.tensor(by, dtype=dtype).repeat(len(values))
    got = launch(shift_kernel, x, y, 2, dtype).tolist()
    numbers = list(zip(x.tolist(), y.tolist(), strict=True))
    assert got == [[wrapped(a << b, dtype) for a, b in numbers], [a >> b for a, b in numbers]]


@triton.jit
def high_kernel(x, y, out, rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, tl.umulhi(a, b))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.int64, torch.uint64])
def test_umulhi_is_the_upper_half_of_the_unsigned_product(launch, dtype: torch.dtype) -> None:
    """Negative numbers take part as their bit patterns."""
    x, y = pairs(corners(dtype), dtype)
    bits = torch.iinfo(dtype).bits
    (got,) = launch(high_kernel, x, y, 1, dtype).tolist()
    products = [(a % (1 << bits)) * (b % (1 << bits)) >> bits for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    assert got == [wrapped(p, dtype) for p in products]


@triton.jit
def unsigned_kernel(x, y, out, rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, a.to(tl.float64))
    tl.store(out + rows + i, a.to(tl.int64).to(tl.float64))
    tl.store(out + 2 * rows + i, tl.where(a > 5, 1.0, 0.0).to(tl.float64))
    tl.store(out + 3 * rows + i, (a / b).to(tl.float64))
    tl.store(out + 4 * rows + i, tl.max(tl.where(a == a, a, b), 0).to(tl.float64) + tl.zeros([BLOCK], tl.float64))
    tl.store(out + 5 * rows + i, a.to(tl.int32, bitcast=True).to(tl.float64))


def test_uint32_is_never_taken_for_int32(launch) -> None:
    """Above 2**31 an uint32 converts, compares, divides and reduces as the large number that it is."""
    x, y = pairs([1, 5, 6, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1], torch.uint32)
    got = launch(unsigned_kernel, x, y, 6, torch.float64)
    wide, other = x.to(torch.int64), y.to(torch.int64)
    most = wide.view(-1, BLOCK).amax(1).repeat_interleave(BLOCK)
    signed = torch.where(wide >= 2**31, wide - 2**32, wide)
    ratio = wide.float() / other.float()
    expected = [wide, wide, (wide > 5), ratio, most, signed]
    for row, truth in zip(got, expected, strict=True):
        assert torch.equal(row, truth.double())


SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, INF, -INF, NAN, 1e-7, 60000.0]


@triton.jit
def float_kernel(x, y, out, rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, a + b)
    tl.store(out + rows + i, a - b)
    tl.store(out + 2 * rows + i, a * b)
    tl.store(out + 3 * rows + i, tl.where(a < b, 1.0, 0.0))
    tl.store(out + 4 * rows + i, tl.where(a != b, 1.0, 0.0))
    tl.store(out + 5 * rows + i, tl.where(a >= b, 1.0, 0.0))
    tl.store(out + 6 * rows + i, tl.abs(a))
    tl.store(out + 7 * rows + i, -a)
    tl.store(out + 8 * rows + i, tl.where(a == b, 1.0, 0.0))
    tl.store(out + 9 * rows + i, a / b)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_with_special_values_are_torchs(launch, dtype: torch.dtype) -> None:
    """Infinities, NaN and signed zeros come out of arithmetic and comparisons as they do from torch."""
    x, y = pairs(SPECIAL, dtype)
    got = launch(float_kernel, x, y, 10, dtype)
    # Compilers before 3.8 emit 0 - x for -x, which makes +0.0 of +0.0.
    negated = -x if VERSION >= (3, 8) else 0 - x
    expected = [x + y, x - y, x * y, x < y, x != y, x >= y, x.abs(), negated, x == y, x / y]
    for row, truth in zip(got, expected, strict=True):
        assert same_floats(row, truth.to(dtype))


@triton.jit
def extreme_kernel(x, y, out, rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, tl.minimum(a, b))
    tl.store(out + rows + i, tl.maximum(a, b))
    tl.store(out + 2 * rows + i, tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 3 * rows + i, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 4 * rows + i, tl.clamp(a, -1.0, 1.0))
    tl.store(out + 5 * rows + i, tl.clamp(a, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL))


@pytest.mark.parametrize("dtype", FLOATS)
def test_extremes_drop_nan_unless_told_to_keep_it(launch, dtype: torch.dtype) -> None:
    """A number beats NaN without propagation and loses with it; of two zeros the negative one is the smaller."""
    x, y = pairs(SPECIAL, dtype)
    got = launch(extreme_kernel, x, y, 6, dtype)
    # PTX ISA, min and max: "+0.0 > -0.0", which neither torch nor numpy promises.
    zeros = (x == 0) & (y == 0)
    smaller = torch.where(x.signbit() | y.signbit(), -0.0, 0.0).to(dtype)
    larger = torch.where(x.signbit() & y.signbit(), -0.0, 0.0).to(dtype)
    bounds = torch.tensor([-1.0, 1.0], dtype=dtype)
    expected = [
        torch.where(zeros, smaller, x.fmin(y)),
        torch.where(zeros, larger, x.fmax(y)),
        torch.where(zeros, smaller, torch.minimum(x, y)),
        torch.where(zeros, larger, torch.maximum(x, y)),
        x.fmax(bounds[0]).fmin(bounds[1]),
        x.clamp(-1.0, 1.0),
    ]
    for row, truth in zip(got, expected, strict=True):
        assert same_floats(row, truth)


@triton.jit
def reduce_kernel(x, y, out, rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i)
    zero = tl.zeros([BLOCK], tl.float32)
    tl.store(out + i, zero + tl.max(a, 0))
    tl.store(out + rows + i, zero + tl.min(a, 0))
    tl.store(out + 2 * rows + i, zero + tl.sum(a, 0).to(tl.float32))
    tl.store(out + 3 * rows + i, zero + tl.argmax(tl.load(y + i), 0))
    tl.store(out + 4 * rows + i, zero + tl.argmin(tl.load(y + i), 0))


@pytest.mark.parametrize("dtype", FLOATS)
def test_reductions_of_blocks_with_nan(launch, dtype: torch.dtype) -> None:
    """Each program reduces its own block: NaN is skipped by max and min, kept by sum; the first of equals is found."""
    blocks = [[1.0] * 8, [NAN, *range(7)], [*range(7), NAN], [NAN] * 8, [INF, -INF, *range(6)], [-0.0] * 8, [-INF] * 8]
    x = torch.tensor(blocks, dtype=dtype)
    y = torch.tensor([[2, 3, 1, 3, 1, 2, 3, 0], [5] * 8, [*range(8)], [*range(8, 0, -1)]] * 2, dtype=dtype)[
        : len(blocks)
    ]
    got = launch(reduce_kernel, x.flatten(), y.flatten(), 5, torch.float32).view(5, -1, BLOCK)[:, :, 0]
    most, least = x.clone(), x.clone()
    most[x.isnan()], least[x.isnan()] = -INF, INF
    empty = x.isnan().all(1)
    most, least = most.amax(1), least.amin(1)
    most[empty] = least[empty] = NAN
    expected = [most, least, x.sum(1), y.argmax(1), y.argmin(1)]
    for row, truth in zip(got, expected, strict=True):
        assert torch.equal(row.nan_to_num(nan=1234.5), truth.float().nan_to_num(nan=1234.5))


@triton.jit
def cast_kernel(x, y, out, rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("target", [torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64])
def test_floats_become_integers_by_truncation_and_saturation(launch, source: torch.dtype, target: torch.dtype) -> None:
    """Fractions are cut off toward zero, and what does not fit becomes the nearest integer that does (cvt.rzi)."""
    values = [0.0, -0.0, 0.9, -0.9, 1.5, -1.5, 1000.0, -1000.0, 3e4, -3e4, 1e5, -1e5, 3e9, -3e9, 1e19, -1e19, INF, -INF]
    x = torch.tensor(values, dtype=source)
    (got,) = launch(cast_kernel, x, x, 1, target).tolist()
    ends = torch.iinfo(target)
    for value, result in zip(x.double().tolist(), got, strict=True):
        whole = math.trunc(value) if math.isfinite(value) else (1 << 70) * int(math.copysign(1, value))
        assert result == min(max(whole, ends.min), ends.max), value


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("target", FLOATS)
def test_integers_become_floats_rounded_once(launch, source: torch.dtype, target: torch.dtype) -> None:
    """Every integer becomes the float nearest to it, ties to even."""
    x = torch.tensor(corners(source), dtype=source)
    (got,) = launch(cast_kernel, x, x, 1, target)
    wide = [float(value) for value in x.tolist()]
    # Python's int -> float64 is rounded once; from there a narrower type is exact, a tie of which float64 shows.
    assert same_floats(got, torch.tensor(wide, dtype=torch.float64).to(target))


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16])
def test_ties_and_overflow_of_narrow_floats(launch, target: torch.dtype) -> None:
    """Halfway values go to even, values beyond the largest become infinity, denormals and signed zeros survive."""
    step = torch.finfo(target).eps
    top, tiny = torch.finfo(target).max, torch.finfo(target).smallest_normal
    values = [1 + step / 2, 1 + 3 * step / 2, -1 - step / 2, top, top * 1.001, -top * 1.01, tiny / 2, tiny * step / 2]
    values += [tiny * step * 0.75, -tiny * step / 4, -0.0, INF, -INF, NAN]
    x = torch.tensor(values, dtype=torch.float32)
    (got,) = launch(cast_kernel, x, x, 1, target)
    assert same_floats(got, x.to(target))


@triton.jit
def bool_kernel(x, y, out, rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i)
    b = tl.load(y + i)
    truth = a.to(tl.int1)
    tl.store(out + i, truth.to(tl.int32))
    tl.store(out + rows + i, (truth & b.to(tl.int1)).to(tl.int32))
    tl.store(out + 2 * rows + i, (truth ^ (b > 0)).to(tl.int32))
    tl.store(out + 3 * rows + i, tl.where((a > b) & truth, 1, 2))
    tl.store(out + 4 * rows + i, (a < b).to(tl.int32) + (a == b).to(tl.int32))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint32, torch.int64, torch.float16, torch.bfloat16, torch.float32])
def test_truth_is_not_zero(launch, dtype: torch.dtype) -> None:
    """A cast to one bit asks whether the value is zero, and what comes out combines with comparisons."""
    x, y = pairs([0, 1, 2, 3, 64], dtype)
    got = launch(bool_kernel, x, y, 5, torch.int32)
    x, y = x.double(), y.double()
    expected = [x != 0, (x != 0) & (y != 0), (x != 0) ^ (y > 0), 2 - ((x > y) & (x != 0)).int(), x <= y]
    for row, truth in zip(got, expected, strict=True):
        assert torch.equal(row, truth.int())
