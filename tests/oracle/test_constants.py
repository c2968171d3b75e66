"""Numbers that 16 bits do not hold: ATen rounds them where it compares or selects, kernels in float32 do not."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_fusion.oracle import run_lanes
from tests.oracle import judging

Function = Callable[[Tensor, Tensor], Tensor]


def _filled(x: Tensor) -> Tensor:
    y = x.clone()
    y[..., ::3].fill_(0.3)
    return y


def _in_part(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, ::3] = 0.3
    return y


def _where_asked(x: Tensor, z: Tensor) -> Tensor:
    y = x.clone()
    y[z > 0] = 0.1
    return y


# Each is its own kernel, given its operands in float32.
PROGRAMS: dict[str, Function] = {
    "ge": lambda x, z: torch.where(x >= 0.1, x, z),
    "gt": lambda x, z: torch.where((x > 0.3) & (z.abs() < 0.7), x, z),
    "as numbers": lambda x, _: (x > 0.3).to(x.dtype),
    "a number as a tensor": lambda x, z: torch.where(x > torch.tensor(0.3), x, z),
    "clamp": lambda x, z: x.clamp(0.1, 0.9) * z,
    "clamp_": lambda x, z: x.clone().clamp_(min=0.3) * z,
    "where": lambda x, z: torch.where(x > 0, x, 0.3) * z,
    "masked_fill": lambda x, z: x.masked_fill(z > 0, 0.3) * z,
    "fill_": lambda x, z: _filled(x) * z,
    "in part": lambda x, z: _in_part(x) * z,
    "where asked": lambda x, z: _where_asked(x, z) * z,
    "a tensor of its own": lambda x, z: torch.maximum(x, torch.tensor(0.3, dtype=x.dtype)) * z,
    "alpha": lambda x, z: torch.add(x, z, alpha=0.3),
    "minus alpha": lambda x, z: torch.sub(x, z, alpha=0.7),
    "threshold": lambda x, _: F.threshold(x, 0.1, 0.7),
    "hardshrink": lambda x, _: F.hardshrink(x, 0.3),
    "hardtanh": lambda x, z: F.hardtanh(x, -0.3, 0.3) * z,
    "full_like": lambda x, z: torch.full_like(x, 0.3) * z + x,
    "full": lambda x, z: torch.full(x.shape, 0.1, dtype=x.dtype, device=x.device) * z,
}


def operands(dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Of the first every fifth element is next to one of the numbers above."""
    generator = torch.Generator().manual_seed(seed)
    x, z = (torch.randn(16, 60, generator=generator) for _ in range(2))
    near = torch.tensor([0.1, 0.3, 0.7, 0.9, -0.3]).repeat_interleave(12)
    x[:, ::5] = near[torch.randint(60, (16, 12), generator=generator)]
    return x.to(dtype), z.to(dtype)


@pytest.mark.parametrize("inside", [torch.float32, None], ids=["float32 inside", "as written"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_numbers_are_right(name: str, dtype: torch.dtype, inside: torch.dtype | None) -> None:
    """A kernel that computes in float32 decides by the number as it was written, and multiplies by it; the reference
    itself by the one that was rounded."""
    program = PROGRAMS[name]
    for seed in range(4):
        x, z = operands(dtype, seed)
        got = program(x.to(inside or dtype), z.to(inside or dtype)).to(dtype)
        assert judging.judged(got, functools.partial(program, x, z), seed), seed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_another_number_is_an_error(dtype: torch.dtype) -> None:
    """A bound, or a threshold, that is a hundredth off; and the wrong side of one that 16 bits hold."""
    x, z = operands(dtype, 0)
    assert not judging.judged((x.float().clamp(0.101, 0.9) * z.float()).to(dtype), lambda: x.clamp(0.1, 0.9) * z, 0)
    few = torch.tensor(0.3, dtype=dtype)
    assert not judging.judged(
        (torch.maximum(x.float(), few.float() * 1.01)).to(dtype), lambda: torch.maximum(x, few), 0
    )
    x[0, 3] = 0.3047
    assert not judging.judged(torch.where(x > 0.308, x, z), lambda: torch.where(x > 0.3, x, z), 0)
    x[0, 3] = 0.5
    assert not judging.judged(torch.where(x > 0.5, x, z), lambda: torch.where(x >= 0.5, x, z), 0)


def test_numbers_that_are_held_leave_values_exact() -> None:
    """No lane differs where the dtype has the number, or is float32, which kernels have too."""
    for dtype, number in ((torch.bfloat16, 0.5), (torch.float16, -65504.0), (torch.float32, 0.1)):
        x, z = operands(dtype, 1)
        found = run_lanes(lambda x=x, z=z, n=number: [torch.where(x > n, x.clamp(max=n), z)], seed=1).outputs[0]
        assert bool((found.lanes == found.oracle).all()), (dtype, number)


def test_float32_inside_rounds_no_number() -> None:
    """Lanes of kind F are those of a kernel in float32: none has the number as 16 bits hold it."""
    x, z = operands(torch.bfloat16, 2)
    found = run_lanes(lambda: [torch.where(x > 0.3, x, z)], kind="F", seed=1).outputs[0]
    wanted = torch.where(x.double() > 0.3, x.double(), z.double())
    assert torch.equal(found.oracle, wanted)
    assert bool((found.lanes == wanted).all())
