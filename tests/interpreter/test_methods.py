"""Functions of Triton that a tensor has as methods."""

from __future__ import annotations

import pytest
import torch

from pytest_fusion import interpreter

interpreter.enable()
triton = pytest.importorskip("triton")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

tl = triton.language


@triton.jit
def methods_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(out + i, a.exp())
    tl.store(out + N + i, a.exp2())
    tl.store(out + 2 * N + i, a.log())
    tl.store(out + 3 * N + i, a.log2())
    tl.store(out + 4 * N + i, a.sin())
    tl.store(out + 5 * N + i, a.cos())
    tl.store(out + 6 * N + i, a.sqrt())
    tl.store(out + 7 * N + i, a.rsqrt())
    tl.store(out + 8 * N + i, a.erf())
    tl.store(out + 9 * N + i, a.floor())
    tl.store(out + 10 * N + i, a.ceil())
    tl.store(out + 11 * N + i, a.sqrt_rn())
    tl.store(out + 12 * N + i, a.abs().sigmoid())
    tl.store(out + 13 * N + i, (a.to(tl.float64) * 2.0).to(tl.float32) + a.sum() - a.max(0))


def test_functions_are_methods_too() -> None:
    """`x.exp()` is `tl.exp(x)`, as compiled; upstream's interpreter calls it without what it computes by."""
    x = torch.rand(16, generator=torch.Generator().manual_seed(0)) + 0.1
    out = torch.empty(14, 16)
    methods_kernel[(1,)](x, out, N=16)
    same = ("exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "rsqrt", "erf", "floor", "ceil", "sqrt", "sigmoid")
    rows = [getattr(x, name)() for name in same] + [2 * x + x.sum() - x.max()]
    torch.testing.assert_close(out, torch.stack(rows), rtol=1e-6, atol=1e-6)
