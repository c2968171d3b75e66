"""Liger-Kernel, unmodified, forward and backward on CPU tensors in three dtypes, against torch in float64.

A smoke test of the interpreter: the judging of these kernels is in ``test_liger.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_fusion import interpreter

if torch.cuda.device_count() > 0 and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for the GPU here; set TRITON_INTERPRET=1", allow_module_level=True)

interpreter.enable()
pytest.importorskip("triton")
ops = pytest.importorskip("liger_kernel.ops")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

EPS = 1e-6
POSITIONS = torch.arange(6)[:, None] / 10000 ** (torch.arange(0, 16, 2)[None, :] / 16)
ANGLES = torch.cat([POSITIONS, POSITIONS], -1)[None]
LABELS = torch.tensor([3, 36, -100, 0, 12])


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = ANGLES.cos()[:, None].to(x.dtype), ANGLES.sin()[:, None].to(x.dtype)
    return x * cos + torch.cat([-second, first], -1) * sin


CASES: dict[str, tuple[Callable[..., object], Callable[..., object], list[tuple[int, ...]]]] = {
    "rms_norm": (
        lambda x, w: ops.rms_norm.LigerRMSNormFunction.apply(x, w, EPS),
        rms_norm,
        [(5, 33), (33,)],
    ),
    "layer_norm": (
        lambda x, w, b: ops.layer_norm.LigerLayerNormFunction.apply(x, w, b, EPS),
        lambda x, w, b: F.layer_norm(x, (33,), w, b, EPS),
        [(5, 33), (33,), (33,)],
    ),
    "swiglu": (
        ops.swiglu.LigerSiLUMulFunction.apply,
        lambda a, b: F.silu(a) * b,
        [(5, 33), (5, 33)],
    ),
    "geglu": (
        ops.geglu.LigerGELUMulFunction.apply,
        lambda a, b: F.gelu(a, approximate="tanh") * b,
        [(5, 33), (5, 33)],
    ),
    "softmax": (
        ops.softmax.LigerSoftmaxFunction.apply,
        lambda x: F.softmax(x, -1),
        [(5, 33)],
    ),
    "rope": (
        lambda q, k: ops.rope.LigerRopeFunction.apply(q, k, ANGLES.cos(), ANGLES.sin()),
        lambda q, k: (rotate(q), rotate(k)),
        [(2, 4, 6, 16), (2, 2, 6, 16)],
    ),
    "cross_entropy": (
        # It writes the gradient over its input, which a leaf that requires grad does not allow.
        lambda x: ops.cross_entropy.LigerCrossEntropyFunction.apply(x * 1, LABELS, None, -100)[0],
        lambda x: F.cross_entropy(x, LABELS),
        [(5, 37)],
    ),
}

# Half a dozen roundings of the dtype: intermediate results are rounded where Liger's casting convention says so.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def tensors(result: object) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES)
def test_liger_runs_forward_and_backward(name: str, dtype: torch.dtype) -> None:
    """The unmodified kernel's outputs and input gradients are torch's up to a few roundings."""
    fused, reference, shapes = CASES[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    got, expected = tensors(fused(*inputs)), tensors(reference(*exact))
    upstream = [torch.randn(e.shape, generator=generator).to(dtype) for e in expected]
    torch.autograd.backward(expected, [u.double() for u in upstream])
    # Liger writes some gradients over the upstream one.
    torch.autograd.backward(got, [u.to(g.dtype).clone() for u, g in zip(upstream, got, strict=True)])
    pairs = [*zip(got, expected, strict=True), *((x.grad, e.grad) for x, e in zip(inputs, exact, strict=True))]
    for ours, theirs in pairs:
        assert ours is not None
        assert torch.allclose(ours.double(), theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
