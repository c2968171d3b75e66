"""Golden outputs: kept from tensors, and compared as plain data."""

from __future__ import annotations

import json
import math

import pytest
import torch

from pytest_fusion.bench.baseline.row import Row
from pytest_fusion.bench.output_digest import SAMPLES, apart, compare_golden, golden_of, positions
from pytest_fusion.oracle.lane_result import OutputLanes


def _verdict(before: torch.Tensor, now: torch.Tensor, allowed: torch.Tensor | float | None = 1e-5) -> str:
    return compare_golden([golden_of("out", before, allowed)], [golden_of("out", now, allowed)])[0].verdict


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.complex64, torch.int64, torch.bool],
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (33, 70)])
def test_every_output_survives_json(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Any dtype and shape makes a record that JSON gives back and that equals itself."""
    made = golden_of("out", torch.ones(shape).mul(3).to(dtype), 1e-3)

    stored = json.dumps(Row("t", "c", "fused", "cpu", golden=(made,)).as_json(), allow_nan=False)
    assert Row.from_json(json.loads(stored)).golden == (made,)
    assert compare_golden([made], [made])[0].verdict == "same"
    assert len(made.values) == len(made.allowed) <= 2 * SAMPLES


def test_layout_is_no_part_of_an_output() -> None:
    """A transposed, a strided and a conjugated view have the digest of their contiguous copy."""
    value = torch.arange(12.0).reshape(3, 4)
    wave = torch.complex(value, value)

    assert golden_of("a", value.t()) == golden_of("a", value.t().contiguous())
    assert golden_of("a", value[:, ::2]) == golden_of("a", value[:, ::2].contiguous())
    assert golden_of("a", wave.conj()) == golden_of("a", wave.conj().resolve_conj())


def test_an_output_that_needs_gradients_is_kept() -> None:
    """The record is of the values alone."""
    value = torch.ones(3, requires_grad=True)

    assert golden_of("a", value * 2) == golden_of("a", torch.full((3,), 2.0))


def test_a_drift_is_told_from_a_change() -> None:
    """Within what is allowed at a sampled element it is a drift, beyond it a change, and equal bits are the same."""
    value = torch.linspace(1, 2, 1000)

    assert _verdict(value, value) == "same"
    assert _verdict(value, value + 5e-6) == "within"
    assert _verdict(value, value + 5e-5) == "changed"


def test_a_change_between_the_samples_moves_the_mean() -> None:
    """Elements that are not sampled are held by the mean magnitude of all."""
    value = torch.ones(100_000)
    other = value.clone()
    other[1::2] = 1.001
    at = set(positions(value.numel()))
    for index in at:
        other[index] = 1.0

    assert _verdict(value, other, 1e-4) == "changed"


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(special: float) -> None:
    """NaN is NaN again and infinity keeps its sign; where one comes or goes the output changed."""
    value = torch.ones(10)
    with_it = value.clone()
    with_it[3] = special
    moved = with_it.clone()
    moved[5] += 5e-6

    assert _verdict(with_it, moved) == "within"
    assert _verdict(with_it, value) == "changed"
    assert _verdict(torch.full((4,), math.inf), torch.full((4,), -math.inf)) == "changed"


def test_integers_may_not_move() -> None:
    """One count off is a change, whatever is allowed of floating outputs, and beyond 2^53 too."""
    assert _verdict(torch.tensor([1, 2]), torch.tensor([1, 3]), 100.0) == "changed"
    assert _verdict(torch.tensor([2**60]), torch.tensor([2**60 + 1]), 100.0) == "changed"
    assert _verdict(torch.tensor([True]), torch.tensor([False]), None) == "changed"


def test_without_an_allowance_other_bits_are_unknown() -> None:
    """Nobody can tell a drift from a change there, so it is neither."""
    assert _verdict(torch.ones(3), torch.ones(3) + 1e-6, None) == "unknown"
    assert _verdict(torch.ones(3), torch.ones(3), None) == "same"


def test_another_shape_or_dtype_is_a_change_and_another_output_is_unknown() -> None:
    """The outputs of both sides are all told of."""
    one, two = golden_of("out", torch.ones(3), 1.0), golden_of("lse", torch.ones(3), 1.0)

    assert _verdict(torch.ones(3), torch.ones(3, 1)) == "changed"
    assert _verdict(torch.ones(3), torch.ones(3, dtype=torch.float64)) == "changed"
    assert [(change.name, change.verdict) for change in compare_golden([one], [two])] == [
        ("out", "unknown"),
        ("lse", "unknown"),
    ]


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64, 1000, 4096 * 4096])
def test_samples_lie_over_the_whole_output(count: int) -> None:
    """In order, each once, the ends among them, and not all in one column of a matrix with 2^n columns."""
    at = positions(count)

    assert at == sorted(set(at))
    assert len(at) == min(count, SAMPLES) or count < 2 * SAMPLES
    assert not at or at[-1] < count
    assert count == 0 or {0, count - 1} <= set(at)
    assert count < 4096 or len({index % 64 for index in at}) > 8


def test_what_two_right_kernels_may_differ_by_comes_from_the_reference() -> None:
    """The allowance covers other roundings of the reference and not a wrong element."""
    generator = torch.Generator().manual_seed(0)
    oracle = torch.randn(64, 32, generator=generator, dtype=torch.float64)
    rounded = oracle + 1e-6 * torch.randn(6, 64, 32, generator=generator, dtype=torch.float64)
    lanes = OutputLanes(native=rounded[0].float(), oracle=oracle, lanes=rounded)
    allowed = apart(lanes)
    assert allowed is not None

    assert allowed.shape == oracle.shape
    assert _verdict(rounded[1].float(), rounded[2].float(), allowed) == "within"
    assert _verdict(rounded[1].float(), (rounded[2] * 1.001).float(), allowed) == "changed"
    assert apart(OutputLanes(torch.ones(3).long(), torch.ones(3).long(), torch.ones(2, 3).long())) is None
