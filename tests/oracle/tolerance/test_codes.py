"""Integer, bool and fp8 outputs: exact, except where rounding before the quantisation decides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pytest_fusion.oracle import run_lanes
from pytest_fusion.oracle.tolerance import ValuesVerdict, excess, judge_output


def judged(candidate: Tensor, reference: Callable[[], Tensor]) -> ValuesVerdict:
    few = run_lanes(lambda: [reference()], seed=1).outputs[0]
    return judge_output(candidate, few, lambda: run_lanes(lambda: [reference()], lanes=24, seed=2).outputs[0])


def _x() -> Tensor:
    return torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))


def _int8(x: Tensor) -> Tensor:
    return (x / (x.abs().amax(-1, keepdim=True) / 127)).round().clamp(-128, 127).to(torch.int8)


def _fp8(x: Tensor) -> Tensor:
    return (x / (x.abs().amax(-1, keepdim=True) / 448)).to(torch.float8_e4m3fn)


def test_int8_quantisation() -> None:
    """Reciprocal scales pass; truncation, a shifted code and two steps at one element fail."""
    x = _x()
    top = x.abs().amax(-1, keepdim=True)
    right = [_int8(x), (x * (127 / top)).round().to(torch.int8), (x * (1 / (top / 127))).round().to(torch.int8)]
    one = _int8(x)
    one[5, 7] += 2
    wrong = [(x / top * 127).to(torch.int8), _int8(x) + 1, one]

    assert [judged(kernel, lambda: _int8(x)).ok for kernel in right] == [True] * 3
    verdicts = [judged(kernel, lambda: _int8(x)) for kernel in wrong]
    assert [v.ok for v in verdicts] == [False] * 3
    assert verdicts[2].index == (5, 7)
    few = run_lanes(lambda: [_int8(x)], seed=1).outputs[0]
    assert (excess(one, few) > 1).nonzero().tolist() == [[5, 7]]


def _in_own_dtype(x: Tensor) -> Tensor:
    """The quotient is rounded to the input's dtype, and truncated."""
    return (x / (x.abs().amax(-1, keepdim=True) / 127)).to(torch.int8)


def _in_float32(x: Tensor, to: Callable[[Tensor], Tensor] = torch.trunc) -> Tensor:
    """As a kernel does it: the scale in the input's dtype, as it is stored, the quotient in float32."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).float()
    return to(x.float() / scale).to(torch.int8)


@pytest.mark.parametrize("value", [0.2275390625, 0.5, 1.1171875, 3.390625, 0.0201416015625])
def test_equal_elements_are_moved_together(value: float) -> None:
    """A row of one value is 127 everywhere or 126, by one rounding; another code is a bug."""
    x = torch.full((2, 128), value, dtype=torch.bfloat16)
    x[1] = torch.randn(128, generator=torch.Generator().manual_seed(3))
    assert judged(_in_float32(x), lambda: _in_own_dtype(x)).ok
    low = _in_float32(x)
    low[0] = 100
    assert not judged(low, lambda: _in_own_dtype(x)).ok


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 8, 13, 15, 19])
def test_fewer_roundings_than_the_reference_pass(seed: int) -> None:
    """Codes of a long float16 row that a kernel rounds once; one that rounds otherwise fails."""
    x = torch.randn(1, 65536, generator=torch.Generator().manual_seed(seed)).half()

    def rounded() -> Tensor:
        return (x / (x.abs().amax(-1, keepdim=True) / 127)).round().to(torch.int8)

    assert judged(_in_float32(x, torch.round), rounded).ok
    assert not judged(_in_float32(x), rounded).ok


def test_fp8_quantisation_with_exact_ties() -> None:
    """Values on ties between codes may go either way; an extra rounding to bfloat16 moves too many."""
    ties = torch.randint(-64, 64, (64, 1024), generator=torch.Generator().manual_seed(2)) * 0.25
    ties[:, 0] = 32 * 127 / 128
    for x in (_x(), ties):
        scale = x.abs().amax(-1, keepdim=True) / 448
        right = (x * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
        wrong = [(x / scale).bfloat16().to(torch.float8_e4m3fn), (x / scale * 0.97).to(torch.float8_e4m3fn)]

        assert judged(_fp8(x), lambda x=x: _fp8(x)).ok  # type: ignore[misc]
        assert judged(right, lambda x=x: _fp8(x)).ok  # type: ignore[misc]
        assert [judged(kernel, lambda x=x: _fp8(x)).ok for kernel in wrong] == [False, False]  # type: ignore[misc]


@pytest.mark.parametrize(
    "power", [torch.exp2, lambda e: 2.0**e, lambda e: 1 / torch.exp2(-e)], ids=["exp2", "pow", "divided"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_two_keep_ties(power: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Scaled by a power of two a tie is a tie in every honest kernel: half up is not half to even."""
    x = torch.tensor([[2.5, -2.5, 0.5, 1.5, 3.5, 6.0]], dtype=dtype).repeat(8, 1)

    def scaled() -> Tensor:
        return x * power(2 - torch.floor(torch.log2(x.abs().amax(-1, keepdim=True))))

    assert judged(torch.round(scaled()), lambda: torch.round(scaled())).ok
    assert not judged(torch.floor(scaled() + 0.5), lambda: torch.round(scaled())).ok
    assert judged(torch.floor(x * 3 / 3 + 0.5), lambda: torch.round(x * 3 / 3)).ok


def _normalised(summed: Tensor, off: float = 0.0) -> Tensor:
    """The layer norm's codes of float16 rows, with a mean that is ``off`` by that share of it."""
    wide = summed.float()
    centred = wide - wide.mean(-1, keepdim=True) * (1 + off)
    value = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-2) * torch.linspace(-1, 1, wide.shape[1])
    top = value.abs().amax(-1, keepdim=True).clamp_min(1e-10)
    return (value * (448 / top)).clamp(-448, 448).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("seed", range(4))
def test_fp8_of_what_rounding_left_of_equal_numbers(seed: int) -> None:
    """A scale blows the mean's error up to the largest code; rows that differ among themselves are judged as ever."""
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(64, 1, generator=generator).half().expand(64, 55).clone() for _ in range(2))

    def reference() -> Tensor:
        return _normalised((x.float() + residual.float()).half())

    assert judged(_normalised(x + residual, 2.0**-23), reference).ok
    x[32:] = torch.randn(32, 55, generator=generator).half()
    right, wrong = _normalised(x + residual, 2.0**-23), _normalised(x + residual).float()
    wrong[40, 7] += 128 * (1 if wrong[40, 7] < 0 else -1)
    assert judged(right, reference).ok
    assert not judged(wrong.to(torch.float8_e4m3fn), reference).ok
    assert not judged(_normalised(x + residual, 0.5), reference).ok


def test_fp8_nan_must_be_where_the_reference_has_it() -> None:
    """Hiding a NaN fails, as does a NaN nobody has."""
    x = torch.tensor([[1.0, torch.nan, 3.0, 4.0]])

    def reference() -> Tensor:
        return (x * 1.1).to(torch.float8_e4m3fn)

    hidden, extra = reference().float().nan_to_num(1.0), reference().float()
    extra[0, 2] = torch.nan

    assert judged(reference(), reference).ok
    assert not judged(hidden.to(torch.float8_e4m3fn), reference).ok
    assert not judged(extra.to(torch.float8_e4m3fn), reference).ok


def test_argmax_is_free_between_equals_only() -> None:
    """Ties may be broken anyhow; an index of a smaller value fails."""
    x = torch.randn(64, 1000, generator=torch.Generator().manual_seed(3))
    tied = torch.zeros(64, 50)
    tied[:, [3, 40]] = 1.0

    def reference() -> Tensor:
        return (x * 1.1).argmax(-1)

    def tied_reference() -> Tensor:
        return ((tied + 0.3) / 0.7).argmax(-1)

    short = (x[:, :700] * 1.1).argmax(-1)

    assert judged(reference(), reference).ok
    assert not judged(short, reference).ok
    assert judged(torch.full((64,), 40), tied_reference).ok
    assert not judged(torch.full((64,), 49), tied_reference).ok
    assert not judged(torch.full((64,), 20), tied_reference).ok


def test_bools_and_plain_integers_are_exact() -> None:
    """Without any rounding before it, a comparison or an integer result admits no difference."""
    x = torch.arange(64).reshape(8, 8)
    flipped = x > 30
    flipped[0, 0] = True

    assert judged(x > 30, lambda: x > 30).statistic == "exact"
    assert not judged(flipped, lambda: x > 30).ok
    assert not judged(x.cumsum(-1) + 1, lambda: x.cumsum(-1)).ok
