"""Products of float8 on tensor cores that keep 14 bits of a sum: what they may lose, and what they may not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pytest_fusion.oracle import OutputLanes, marks, run_lanes
from pytest_fusion.oracle.tolerance import judge_output

TERMS, BLOCK = 4096, 128
SCALE = torch.tensor(0.37)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "adds_coarsely", lambda _: True)


def passes(candidate: Tensor, reference: Callable[[], Tensor]) -> bool:
    def lanes(count: int, seed: int) -> OutputLanes:
        return run_lanes(lambda: [reference()], lanes=count, kind="E", seed=seed).outputs[0]

    return judge_output(candidate, lanes(6, 1), lambda: lanes(24, 101)).ok


def factors(positive: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((32, TERMS), (TERMS, 48)))
    x, weight = (x.abs(), weight.abs()) if positive else (x, weight)
    return x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)


def reference_of(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: ((x.float() * SCALE) @ weight.float()).to(dtype)


def cut(total: Tensor) -> Tensor:
    """A sum of which the accumulator kept 14 bits, and cut off the rest."""
    exponent = total.double().abs().clamp_min(1e-30).log2().floor() - 13
    return (total.double() / exponent.exp2()).trunc() * exponent.exp2()


def added(x: Tensor, weight: Tensor, dtype: torch.dtype, *, block: int) -> Tensor:
    """As Hopper adds: groups of 32 to 14 bits, and each block of those to a float32 of the kernel's own."""
    whole = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float64)
    for start in range(0, TERMS, block):
        part = torch.zeros_like(whole)
        for at in range(start, start + block, 32):
            part = cut(part + x[:, at : at + 32].double() @ weight[at : at + 32].double())
        whole += part
    return (whole * SCALE.double()).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("positive", [True, False])
def test_sums_that_are_taken_over_in_time_pass(hopper: None, positive: bool, dtype: torch.dtype) -> None:
    """Each 128 products go to a float32 of the kernel's own, as the hardware's makers and users advise."""
    x, weight = factors(positive)
    assert passes(added(x, weight, dtype, block=BLOCK), reference_of(x, weight, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_that_are_left_there_fail(hopper: None, dtype: torch.dtype) -> None:
    """4096 positive products in one accumulator of 14 bits lose more than any honest kernel."""
    x, weight = factors(positive=True)
    assert not passes(added(x, weight, dtype, block=TERMS), reference_of(x, weight, dtype))


def test_other_hardware_has_no_such_excuse() -> None:
    """On the CPU lane, which adds in float32, the same loss is a bug."""
    x, weight = factors(positive=True)
    assert not passes(added(x, weight, torch.float32, block=BLOCK), reference_of(x, weight, torch.float32))


def test_a_factor_of_more_bits_has_no_such_excuse(hopper: None) -> None:
    """A bfloat16 factor sends the product to other tensor cores, whose accumulator is a float32."""
    x, weight = factors(positive=True)
    wide = x.to(torch.bfloat16) * torch.tensor(1.0078125, dtype=torch.bfloat16)
    fresh = torch.empty_like(wide).copy_(wide)
    coarse = added(fresh, weight, torch.float32, block=BLOCK)
    assert not passes(coarse, reference_of(fresh, weight, torch.float32))
