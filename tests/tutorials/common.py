"""What the tests of the tutorials share: the lane, the dtypes, the inputs and the judgement.

Importing this module switches the lane on, so it comes before ``triton`` in every file here.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from pytest_fusion import interpreter
from tests.sweeps import sweep

if torch.cuda.device_count() > 0 and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for the GPU here; set TRITON_INTERPRET=1", allow_module_level=True)

interpreter.enable()
pytest.importorskip("triton")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
a_float = sweep("dtype", FLOATS, fast=("bfloat16",), ids=lambda dtype: str(dtype).removeprefix("torch."))
VERSION = tuple(int(part) for part in str(interpreter.version()).split("+", maxsplit=1)[0].split(".")[:2])
UNIT = 2.0**-24  # half the distance from 1 to the next float32: the relative error of one rounding


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Standard normal values, the same for every call with this shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(got: Tensor, exact: Tensor, *, roundings: int, scale: Tensor | None = None, narrow: int = 0) -> None:
    """``got`` is ``exact`` (float64) as float32 arithmetic and one last rounding to its own dtype may leave it.

    ``roundings`` counts the float32 roundings on the way: each moves the result by at most ``UNIT`` of ``scale``, the
    sum of the magnitudes of what was added up (default: the result's own, where nothing cancels). ``narrow`` counts the
    intermediate roundings to the dtype itself. Non-finite values must be the same ones.
    """
    assert got.shape == exact.shape
    kind = torch.finfo(got.dtype)
    half = kind.eps / 2
    size = exact.abs()
    scale = size if scale is None else torch.maximum(scale, size)
    allowed = half * size + (1 + half) * (narrow * half + roundings * UNIT) * scale + kind.smallest_normal * kind.eps
    wrong = ~((got.double() - exact).abs() <= allowed)
    wrong &= ~((got.double() == exact) | (got.isnan() & exact.isnan()))
    if wrong.any():
        worst = torch.where(wrong, (got.double() - exact).abs() / allowed, 0).nan_to_num(nan=float("inf")).argmax()
        place = tuple(int(i) for i in torch.unravel_index(worst, got.shape))
        pytest.fail(
            f"{int(wrong.sum())} of {got.numel()} elements are wrong; at {place} {got[place].item()} instead of "
            f"{exact[place].item()}, allowed is {allowed[place].item():.3g}"
        )


def assert_product(got: Tensor, a: Tensor, b: Tensor, *, leaky: bool = False) -> None:
    """``got`` is ``a @ b`` added up in float32 (which the lane does also where a GPU would take tf32), rounded once.

    K products, exact in float32 for inputs up to 16 bits wide, are added in any order: K roundings, one for a wide
    product, one for the leaky relu, which enlarges no error.
    """
    exact = a.double() @ b.double()
    exact = torch.where(exact >= 0, exact, 0.01 * exact) if leaky else exact
    assert_rounded(got, exact, roundings=a.shape[1] + 2, scale=a.double().abs() @ b.double().abs())
