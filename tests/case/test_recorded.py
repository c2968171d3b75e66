"""Values by the summary of a recorded tensor, or the tensor itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion.case import recorded_values, regimes
from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.case.make import ImpossibleCase, make_inputs
from pytest_fusion.case.recorded_values import Like, Stored
from pytest_fusion.case.stated import misfit
from pytest_fusion.errors import ReplayError
from pytest_fusion.spec import values
from pytest_fusion.spec.dims import dim
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor

CPU = torch.device("cpu")


def summary(t: torch.Tensor) -> dict[str, float]:
    x = t.double()
    finite = x[x.isfinite()]
    return {
        "low": float(finite.min()),
        "high": float(finite.max()),
        "mean": float(finite.mean()),
        "rms": float(finite.square().mean().sqrt()),
        "absolute": float(finite.abs().mean()),
        "zeros": float((x == 0).double().mean()),
        "nan": float(x.isnan().double().mean()),
        "inf": float((x == math.inf).double().mean()),
        "ninf": float((x == -math.inf).double().mean()),
    }


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


TRAFFIC = {
    "normal": normal(64, 512),
    "offset": normal(64, 512) * 0.5 + 20,
    "relu": normal(64, 512).relu(),
    "outliers": torch.where(torch.arange(64 * 512).reshape(64, 512) % 1024 == 5, 300.0, normal(64, 512)),
    "both ends": torch.where(torch.arange(64 * 512).reshape(64, 512) % 512 < 2, 300.0 * normal(64, 512).sign(), 0.1),
    "nan": torch.where(torch.arange(64 * 512).reshape(64, 512) % 50 == 0, math.nan, normal(64, 512)),
    "inf": torch.where(torch.arange(64 * 512).reshape(64, 512) % 30 == 0, -math.inf, normal(64, 512)),
    "zeros": torch.zeros(64, 512),
    "constant": torch.full((64, 512), 3.0),
    "tiny": normal(64, 512) * 1e-4,
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_what_is_drawn_has_the_summary_of_what_was_recorded(name: str) -> None:
    """Range to the bit, scale and shares of zeros, NaN and infinities within what chance does to 32,768 elements."""
    wanted = summary(TRAFFIC[name])
    like = recorded_values.parse(str(recorded_values.fitted(**wanted)))
    assert isinstance(like, Like)

    made = recorded_values.make(like, (64, 512), torch.float32, 7, CPU)

    assert made is not None
    found = summary(made)
    assert found["low"] == pytest.approx(wanted["low"])
    assert found["high"] == pytest.approx(wanted["high"])
    assert found["rms"] == pytest.approx(wanted["rms"], rel=0.2)
    assert found["absolute"] == pytest.approx(wanted["absolute"], rel=0.2)
    for share in ("zeros", "nan", "inf", "ninf"):
        assert found[share] == pytest.approx(wanted[share], rel=0.2, abs=1e-4)


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (torch.float16, (-3e4, 1.0, 3.0), True),
        (torch.float16, (-300.0, 300.0, 80.0), False),
        (torch.float16, (-1e-5, 1e-5, 1e-6), True),
        (torch.bfloat16, (0.0, 1e18, 1e17), True),
        (torch.float32, (0.0, 6e4, 1e3), False),
        (torch.float32, (0.0, 0.0, 0.0), False),
        (torch.int8, (-128.0, 127.0, 60.0), False),
    ],
)
def test_values_at_the_ends_of_a_dtype_are_special(
    dtype: torch.dtype, values: tuple[float, float, float], expected: bool
) -> None:
    """What the regimes huge and subnormal are to the checks, recorded values of that size are too; others are not."""
    low, high, absolute = values

    assert recorded_values.extreme(dtype, low=low, high=high, absolute=absolute) is expected


def test_the_ends_of_the_range_are_there_whatever_the_seed() -> None:
    """The least and the largest value never take one place, and neither does a NaN take theirs."""
    like = Like(-9.0, 5.0, 0.0, 0.2, nan=1e-6)

    for seed in range(200):
        for count in (12, 13, 50):
            made = recorded_values.make(like, (count,), torch.float32, seed, CPU)
            assert made is not None
            assert int(made.isnan().sum()) == 1
            assert (float(made[~made.isnan()].min()), float(made[~made.isnan()].max())) == (-9.0, 5.0)


def test_what_was_rare_is_there_in_a_small_tensor_too() -> None:
    """One NaN in a million elements is one NaN in a hundred: it decides what the kernel is asked."""
    like = Like(-1.0, 5.0, 0.0, 0.2, nan=1e-6)

    made = recorded_values.make(like, (10, 10), torch.float16, 3, CPU)

    assert made is not None
    assert int(made.isnan().sum()) == 1
    assert float(made.nan_to_num().max()) == 5.0


@pytest.mark.parametrize(
    ("dtype", "bounds", "low", "high"),
    [
        (torch.int64, None, -3, 90),
        (torch.int32, (0, 20), 0, 20),
        (torch.uint8, None, 0, 90),
        (torch.int8, (30, 9), 9, 9),
    ],
)
def test_integers_keep_their_range_and_the_specs(
    dtype: torch.dtype, bounds: tuple[int, int] | None, low: int, high: int
) -> None:
    """Whole numbers within what was recorded, what the dtype holds and what the spec allows at these sizes."""
    if bounds == (30, 9):
        bounds = (9, 9)
    made = recorded_values.make(Like(-3, 90, 40, 20), (4000,), dtype, 3, CPU, bounds)

    assert made is not None
    assert made.dtype == dtype
    assert (int(made.min()), int(made.max())) == (low, high)


def spec_of(profile: Any, dtype: torch.dtype = torch.int64) -> FusionSpec:
    return FusionSpec(
        fused=lambda x: x,
        reference=lambda x: x,
        inputs={"x": tensor("rows n", values=profile, dtype=dtype)},
        dims={"rows": dim(0, 99)},
    )


def case_of(regime: str, dtype: str = "int64", rows: int = 3, n: int = 40) -> Case:
    return Case({"rows": rows, "n": n}, "float32", {"x": TensorCase(dtype, regime=regime)}, seed=11)


def test_indices_follow_a_size_that_shrinks() -> None:
    """Indices drawn like recorded ones are indices still when the dim that they point into becomes smaller."""
    spec = spec_of(values.indices("n"))
    regime = str(Like(0, 39, 20, 12))

    for n in (40, 7, 1):
        case = case_of(regime, n=n)
        assert misfit(spec, case) is None
        assert int(make_inputs(spec, case, CPU)["x"].max()) == n - 1


@pytest.mark.parametrize("profile", [values.permutation(), lambda shape, dtype, g: torch.full(shape, 4, dtype=dtype)])
def test_a_summary_does_not_break_what_the_spec_promises(profile: Any) -> None:
    """A permutation stays one, and a user's function is asked: a range says too little of either."""
    spec = spec_of(profile)

    made = make_inputs(spec, case_of(str(Like(0, 39, 20, 12))), CPU)["x"]

    assert torch.equal(made, make_inputs(spec, case_of("unit"), CPU)["x"])


def stored(folder: Path, **tensors: torch.Tensor) -> Path:
    from safetensors.torch import save

    data = save(tensors)
    path = folder / f"{recorded_values.digest(data)}.safetensors"
    path.write_bytes(data)
    return path


def test_a_stored_tensor_is_replayed_to_the_bit_and_shrinks(tmp_path: Path) -> None:
    """A case of a file holds the recorded elements; at smaller sizes the first of them, at larger none."""
    pytest.importorskip("safetensors")
    x = torch.arange(120).reshape(3, 40) % 37
    regime = str(Stored(str(stored(tmp_path, x=x)), "x"))
    spec = spec_of(None)

    assert torch.equal(make_inputs(spec, case_of(regime), CPU)["x"], x)
    assert torch.equal(make_inputs(spec, case_of(regime, rows=2, n=5), CPU)["x"], x[:2, :5])
    with pytest.raises(ImpossibleCase):
        make_inputs(spec, case_of(regime, rows=4), CPU)
    permuted = spec_of(values.permutation())
    assert torch.equal(make_inputs(permuted, case_of(regime), CPU)["x"], x), "as it came, whatever the spec draws"
    assert int(make_inputs(permuted, case_of(regime, n=5), CPU)["x"].max()) == 4, "a part of it is none"


@pytest.mark.parametrize("wrong", ["gone", "changed", "key"])
def test_stored_tensors_that_are_not_those_recorded_are_refused(tmp_path: Path, wrong: str) -> None:
    """A file that is gone, was changed, or lacks the tensor is an error that says so, and no pass on other values."""
    pytest.importorskip("safetensors")
    path = stored(tmp_path, x=torch.zeros(3, 40, dtype=torch.int64))
    if wrong == "gone":
        path.unlink()
    elif wrong == "changed":
        path.write_bytes(path.read_bytes() + b"\0")
    regime = str(Stored(str(path), "y" if wrong == "key" else "x"))

    with pytest.raises(
        ReplayError, match={"gone": "cannot be read", "changed": "their hash is", "key": "has no 'y'"}[wrong]
    ):
        make_inputs(spec_of(None), case_of(regime), CPU)


def test_the_texts_come_back_and_damaged_ones_are_no_regime() -> None:
    """A regime's text says all of it; anything else is no case of any spec, and NaN makes one special."""
    for own in (
        Like(-4.5, 4.25, 0.125, 1.0),
        Like(0, 1, 0, 1, 0.1, 0.2, 0.3, 0.4, 0.5),
        Like(0, 6e4, 0, 1, extreme=1),
        Stored("/a#b.st", "x[0]", False),
    ):
        assert recorded_values.parse(str(own)) == own
        assert regimes.is_special(str(own)) is not own.ordinary
    for text in ("like()", "like(low=2,high=1,mean=0,std=1)", "like(low=nan,high=1,mean=0,std=1)", "stored(x)", "unit"):
        assert recorded_values.parse(text) is None
    assert "does not exist" in str(misfit(spec_of(None), case_of("like(low=2)")))


def test_a_kind_of_values_that_the_spec_does_not_draw_is_a_misfit() -> None:
    """A stored case of infinities is none of a spec of finite values; kinds that narrowed values ignore are let be."""
    assert "which the spec does not draw" in str(
        misfit(spec_of(values.finite(), torch.float32), case_of("inf", "float32"))
    )
    assert misfit(spec_of(values.finite(), torch.float32), case_of("large", "float32")) is None
    assert misfit(spec_of(None, torch.float32), case_of("inf", "float32")) is None
    assert misfit(spec_of(values.normal(), torch.float32), case_of("inf", "float32")) is None
