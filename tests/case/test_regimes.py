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
    inf = regimes.make("inf", (8, 5), torch.float32, 3, CPU)
    assert {float("inf"), -float("inf")} <= set(inf.flatten().tolist())
    small = regimes.make("subnormal", (64,), torch.float32, 3, CPU)
    assert bool((small.abs() < torch.finfo(torch.float32).smallest_normal).any())
    huge = regimes.make("huge", (64,), torch.float16, 3, CPU)
    assert float(huge.abs().min()) > 0.4 * 65504


def test_ordinary_regimes_are_what_kernels_get_wrong() -> None:
    """Offset rows sit far from zero, cancelling rows nearly sum to it, zero rows are zero, an outlier stands out."""
    offset = regimes.make("offset", (4, 64), torch.float32, 3, CPU)
    assert float(offset.mean()) > 20
    cancelling = regimes.make("cancelling", (4, 64), torch.float64, 3, CPU)
    assert bool((cancelling.sum(-1).abs() < 0.02 * cancelling.abs().sum(-1)).all())
    rows = regimes.make("zero-rows", (4, 64), torch.float32, 3, CPU)
    assert not bool(rows[0].any())
    assert bool(rows[1].any())
    outlier = regimes.make("outlier", (4, 64), torch.float32, 3, CPU).abs()
    assert bool(((outlier > 100).sum(-1) == 1).all())


def test_finite_names_leave_out_the_special_ones() -> None:
    """A finite profile never meets NaN, infinity, subnormal or huge values."""
    assert set(regimes.names(finite=False)) - set(regimes.names(finite=True)) == {"nan", "inf", "huge", "subnormal"}
    assert set(regimes.COVERED) <= set(regimes.REGIMES)
