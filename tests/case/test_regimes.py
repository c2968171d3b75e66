"""Value regimes: what each holds, in every floating dtype and any shape."""

from __future__ import annotations

import pytest
import torch

from pytest_fusion.case import regimes

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("name", regimes.REGIMES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5, 7), (2, 3, 4)])
def test_a_regime_fits_every_shape_and_dtype(name: str, shape: tuple[int, ...]) -> None:
    """Shape, dtype and contiguity are as asked; only special regimes hold what is not finite."""
    for dtype in DTYPES:
        v = regimes.make(name, shape, dtype, 3, CPU)
        assert (tuple(v.shape), v.dtype, v.is_contiguous()) == (shape, dtype, True)
        if not regimes.is_special(name) or name == "huge":
            assert bool(v.double().isfinite().all())


def test_the_special_regimes_hold_what_they_are_named_after() -> None:
    """NaN, both infinities, subnormals and numbers near the limit do occur, in the last column too."""
    nan = regimes.make("nan", (8, 5), torch.float32, 3, CPU)
    assert bool(nan.isnan().any())
    assert bool(nan[:, -1].isnan().any())
    assert bool((~nan.isnan().any(-1)).any()), "one row in four stays clean"
    infinite = [regimes.make("inf", (8, 5), torch.float32, seed, CPU) for seed in range(6)]
    assert any({float("inf"), -float("inf")} <= set(v.flatten().tolist()) for v in infinite)
    small = regimes.make("subnormal", (64,), torch.float32, 3, CPU)
    assert bool((small.abs() < torch.finfo(torch.float32).smallest_normal).any())
    huge = regimes.make("huge", (64,), torch.float16, 3, CPU)
    assert float(huge.abs().min()) > 0.4 * 65504


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_nan_has_either_sign(dtype: torch.dtype) -> None:
    """About half of them have a sign bit, numbers keep theirs; none where torch.sort on CUDA would sort them first."""
    signs = []
    for seed in range(60):
        v = regimes.make("nan", (6, 5), dtype, seed, CPU)
        signs += v[v.isnan()].signbit().tolist()
        numbers = v[~v.isnan()].double()
        assert 0 < int((numbers < 0).sum()) == int(numbers.signbit().sum())
    assert 0.3 < sum(signs) / len(signs) < 0.7
    assert regimes.make("nan", (), dtype, 1, CPU).shape == ()
    for shape in ((33, 1), (12, 12)):
        large = regimes.make("nan", shape, dtype, 3, CPU)
        assert bool(large.isnan().any())
        assert not bool(large[large.isnan()].signbit().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_nan_has_all_bits_set_at_times(dtype: torch.dtype) -> None:
    """As NVIDIA's arithmetic makes it: rounded as an integer it is a number afterwards."""
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    v = torch.cat([regimes.make("nan", (6, 5), dtype, seed, CPU).flatten() for seed in range(30)])
    bits = v[v.isnan()].view(word)
    full = (bits & torch.iinfo(word).max) == torch.iinfo(word).max
    assert 0.3 < float(full.double().mean()) < 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_neighbours_of_powers_of_two_are_met(dtype: torch.dtype) -> None:
    """Above and below, and the power itself; in every other tensor there is none of it."""
    met = {-1: 0, 0: 0, 1: 0}
    for seed in range(20):
        v = regimes.make("hundred", (40,), dtype, seed, CPU)
        for by in met:
            away = torch.full_like(v, float("inf") * by) if by else v
            beside = torch.nextafter(v.abs(), -away) if by else v.abs()
            met[by] += int((beside.double().frexp().mantissa == 0.5).sum()) > 2
    assert all(5 <= count <= 15 for count in met.values()), met


def test_minus_infinity_comes_in_runs_too() -> None:
    """For some seeds all of the first 32 elements of a row are -inf, and something finite follows in every row."""
    masked = 0
    for seed in range(60):
        v = regimes.make("inf", (4, 100), torch.float32, seed, CPU)
        leading = v[:, :32].isneginf().all(-1)
        masked += bool(leading.any())
        assert bool(v.isfinite().any(-1).all())
        assert not bool(leading.all())
    assert 6 <= masked <= 30


def test_ordinary_regimes_are_what_kernels_get_wrong() -> None:
    """Offset rows sit far from zero, cancelling rows nearly sum to it, zero rows are zero, an outlier stands out."""
    offset = regimes.make("offset", (4, 64), torch.float32, 3, CPU)
    assert abs(float(offset.mean())) > 20
    cancelling = regimes.make("cancelling", (4, 64), torch.float64, 3, CPU)
    assert bool((cancelling.sum(-1).abs() < 0.02 * cancelling.abs().sum(-1)).all())
    rows = regimes.make("zero-rows", (4, 64), torch.float32, 3, CPU)
    assert not bool(rows[0].any())
    assert bool(rows[1].any())
    outlier = regimes.make("outlier", (4, 64), torch.float32, 3, CPU).abs()
    assert bool(((outlier > 100).sum(-1) == 1).all())


def test_offsets_are_of_both_signs() -> None:
    """Every tensor lies on one side of zero as a whole, about half of them below."""
    below = [bool((regimes.make("offset", (4, 64), torch.float16, seed, CPU) < -15).all()) for seed in range(200)]
    above = [bool((regimes.make("offset", (4, 64), torch.float16, seed, CPU) > 15).all()) for seed in range(200)]
    assert 70 <= sum(below) <= 130
    assert [not one for one in below] == above


def test_some_negative_tensors_are_far_below_zero_throughout() -> None:
    """A maximum that is held above -50 or -10000 showed in no row: none lay below as a whole."""
    every = [regimes.make("negative", (4, 64), torch.bfloat16, seed, CPU) for seed in range(300)]
    ranges = {"near": (-5.1, -0.9), "far": (-1008, -199), "farther": (-40_200, -19_900)}
    found = {name: [bool(((v >= low) & (v <= high)).all()) for v in every] for name, (low, high) in ranges.items()}
    assert all(sum(one) == 1 for one in zip(*found.values(), strict=True))
    assert 40 <= sum(found["far"]) <= 95
    assert 15 <= sum(found["farther"]) <= 55
    low = [regimes.make("negative", (4,), torch.float16, seed, CPU).min() for seed in range(100)]
    assert min(low) >= -1025


@pytest.mark.parametrize("rows", [2, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_small_rows_straddle_epsilons(rows: int, dtype: torch.dtype) -> None:
    """Some seeds give a row whose norm is above an epsilon, some one below it, and never far below the dtype's range;
    1e-12 is out of reach of float16. Nine rows have both kinds in every tensor."""
    least = 4 * float(torch.finfo(dtype).smallest_normal)
    norms, tiny = [], 0
    for seed in range(40):
        v = regimes.make("zero-rows", (rows, 12), dtype, seed, CPU).double()
        assert not bool(v[::2].any())
        found = v[1::2].norm(dim=-1)
        assert float(found.min()) > least / 2
        tiny += bool((found < 2.0**-9).any()) and bool((found > 2.0**-9).any())
        norms += found.tolist()
    for epsilon in (1e-3,) if dtype is torch.float16 else (1e-12, 1e-6, 1e-3):
        assert min(norms) < epsilon < max(norms)
        # Far below, what an epsilon does to a gradient no longer shows.
        assert any(epsilon / 32 < norm < epsilon for norm in norms)
    assert rows < 9 or tiny == 40


def test_float8_rows_stay_in_its_range() -> None:
    """Nothing is so small that a float8 would lose it: its small rows are all at 2^-8."""
    rows = regimes.make("zero-rows", (9, 64), torch.float8_e5m2, 3, CPU).double()[1::2]
    assert bool((rows.abs().amax(-1) > 2.0**-8).all())


def test_some_huge_tensors_are_negative_throughout() -> None:
    """One in three has no positive element, so that a maximum cannot hide what it started from; none is all positive
    of enough elements."""
    shares = [float((regimes.make("huge", (64,), torch.bfloat16, seed, CPU) < 0).double().mean()) for seed in range(60)]
    assert 10 <= shares.count(1.0) <= 30
    assert all(share == 1.0 or 0.2 < share < 0.8 for share in shares)


def test_ties_have_zeros_of_both_signs() -> None:
    """Equal numbers whose bits differ: a sort by bits is not stable on them. Some are whole, as bounds are."""
    kinds = set()
    for seed in range(8):
        v = regimes.make("ties", (8, 64), torch.float32, seed, CPU)
        zeros = v[v == 0]
        assert 0.2 < float(zeros.signbit().double().mean()) < 0.8
        kinds.add(tuple(sorted(set(v.flatten().tolist()))))
    assert kinds == {(-1.0, -0.5, 0.0, 0.5, 1.0), tuple(float(n) for n in range(-6, 7))}


def test_a_masked_row_has_no_finite_maximum_in_its_first_half() -> None:
    """And something finite in the other; one element, or none, is what it is elsewhere."""
    v = regimes.make("masked", (3, 9), torch.float16, 4, CPU)
    assert bool((v[:, :5] == -float("inf")).all())
    assert bool(torch.isfinite(v[:, 5:]).all())
    assert bool(torch.isfinite(regimes.make("masked", (3, 1), torch.float32, 4, CPU)).all())
    assert regimes.make("masked", (3, 0), torch.float32, 4, CPU).shape == (3, 0)


def test_finite_names_leave_out_the_special_ones() -> None:
    """A finite profile never meets NaN, infinity, subnormal or huge values."""
    assert set(regimes.names(finite=False)) - set(regimes.names(finite=True)) == {
        "nan",
        "inf",
        "masked",
        "huge",
        "subnormal",
    }
    assert set(regimes.COVERED) <= set(regimes.REGIMES)
