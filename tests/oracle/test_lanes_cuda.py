"""Lanes and judge on CUDA tensors: the same rules on the device, gradients from autograd's device thread included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion.oracle import OutputLanes, run_lanes
from pytest_fusion.oracle.tolerance import judge_output
from pytest_fusion.oracle.tolerance.codes import judge_codes
from tests.oracle import judging
from tests.oracle.test_constants import PROGRAMS, operands

pytestmark = pytest.mark.gpu


@triton.jit
def product_kernel(
    a: tl.tensor, b: tl.tensor, out: tl.tensor, inner: tl.tensor, SIDE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    i = tl.arange(0, SIDE)
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for first in range(0, inner, BLOCK):
        k = first + tl.arange(0, BLOCK)
        left = tl.load(a + i[:, None] * inner + k[None, :])
        total = tl.dot(left, tl.load(b + k[:, None] * SIDE + i[None, :]), total)
    tl.store(out + i[:, None] * SIDE + i[None, :], total)


def _x(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)


def _lanes(reference: Callable[[], Tensor], count: int, seed: int) -> OutputLanes:
    found = run_lanes(lambda: [reference()], lanes=count, seed=seed)
    assert found.fallbacks == ()
    return found.outputs[0]


def _attention(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], x[0], 1e-6),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], x[0], x[1]),
    "softmax": lambda x: x.softmax(-1),
    "linear": lambda x: F.linear(x, x, x[:, 0].contiguous()),
    "gelu": lambda x: F.gelu(x @ x.t()),
    "attention": lambda x: _attention(x.reshape(1, 4, -1, 64)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(x.shape[0], device=x.device)),
    "scatter": lambda x: torch.zeros_like(x).index_add(0, torch.arange(x.shape[0], device=x.device) % 3, x * 1.1),
    "convolution": lambda x: F.conv1d(x[None], x[:6, :32].t().reshape(2, 32, 3)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", REFERENCES)
def test_native_and_float64_results_pass_and_wrong_ones_fail(name: str, dtype: torch.dtype) -> None:
    """The reference passes, so does float64 arithmetic with one rounding; one element off by 7 % fails."""
    x = _x(dtype, 32, 512)

    def reference() -> Tensor:
        return REFERENCES[name](x)

    few = _lanes(reference, 6, 1)
    wrong = few.native.clone(memory_format=torch.contiguous_format)
    place = int(wrong.abs().argmax())
    wrong.view(-1)[place] *= 1.07

    def more() -> OutputLanes:
        return _lanes(reference, 24, 2)

    assert judge_output(few.native, few, more).ok
    assert judge_output(REFERENCES[name](x.double()).to(dtype), few, more).ok
    assert not judge_output(wrong, few, more).ok


@pytest.mark.parametrize("inner", [256, 1024, 4096])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("values", ["positive", "equal", "signed"])
def test_tensor_cores_truncate(values: str, dtype: torch.dtype, inner: int) -> None:
    """A product of 16-bit values left in float32 passes beside one of float32; rounded to 16 bits it fails."""
    a, b = _x(dtype, 64, inner), _x(dtype, inner, 64)
    if values == "equal":
        a, b = a[:, :1].expand_as(a).contiguous(), b[:1].expand_as(b).contiguous()
    if values != "signed":
        a, b = a.abs(), b.abs()
    got = torch.empty(64, 64, device="cuda")
    product_kernel[(1,)](a, b, got, inner, SIDE=64, BLOCK=64)

    def reference() -> Tensor:
        return a.float() @ b.float()

    few = _lanes(reference, 6, 1)

    def more() -> OutputLanes:
        return _lanes(reference, 24, 2)

    assert judge_output(got, few, more).ok
    assert not judge_output(got.to(dtype).float(), few, more).ok


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "softmax", "linear", "gelu", "attention", "cross_entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_on_the_device_thread(name: str, dtype: torch.dtype) -> None:
    """Backward runs in autograd's own thread on CUDA; its operations are followed there too."""
    x = _x(dtype, 32, 512)

    def reference() -> Tensor:
        leaf = x.clone().requires_grad_()
        out = REFERENCES[name](leaf)
        return torch.autograd.grad(out, leaf, _x(dtype, *out.shape))[0]

    few = _lanes(reference, 6, 1)

    assert float((few.lanes - few.oracle).abs().max()) > 0
    assert judge_output(few.native, few, lambda: _lanes(reference, 24, 2)).ok
    assert not judge_output(few.native * 1.05, few, lambda: _lanes(reference, 24, 2)).ok


def test_a_cpu_scalar_among_device_tensors() -> None:
    """A zero-dimensional CPU tensor broadcasts with CUDA tensors, on the lanes as natively."""
    x = _x(torch.float32, 8, 64)

    out = _lanes(lambda: x * 1.1 + torch.tensor(0.3), 6, 1)

    assert torch.allclose(out.oracle, x.double() * 1.1 + torch.tensor(0.3).double(), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_that_16_bits_do_not_hold(name: str, dtype: torch.dtype) -> None:
    """Those that came as tensors are on the CPU beside operands of the GPU."""
    x, z = (t.cuda() for t in operands(dtype, 0))
    program = PROGRAMS[name]
    for got in (program(x, z), program(x.float(), z.float()).to(dtype)):
        assert judging.judged(got, lambda: program(x, z), 0)


@pytest.mark.parametrize("width", [2, 40, 300])
@pytest.mark.parametrize("stable", [False, True])
def test_nan_with_a_sign_bit_is_the_largest_whatever_a_sort_makes_of_it(width: int, stable: bool) -> None:
    """Torch's sorts on CUDA take it for the least, some of them; a kernel that orders as torch says is right."""
    x = torch.randn(3, width, device="cuda")
    x[1, 0] = -torch.nan
    expected = torch.sort(x.cpu(), descending=True, stable=True)

    values, places = run_lanes(lambda: list(torch.sort(x, descending=True, stable=stable)), seed=1).outputs

    assert torch.equal(places.oracle.cpu().to(torch.int64), expected.indices)
    assert judge_codes(expected.indices.cuda(), places).ok
    assert judge_codes(places.native, places).ok
    assert bool(values.oracle[1, 0].isnan())
