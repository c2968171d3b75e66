"""linear_cross_entropy and dequant_matmul of the reference suite at the sizes of a model, which no search draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu


def _off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The root mean square error, relative to that of what is wanted."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def _layer(rows: int, hidden: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, hidden, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, device="cuda").mul_(hidden**-0.5).to(dtype).requires_grad_()
    target = torch.randint(vocab, (rows,), device="cuda")
    target[::7] = -100
    return x, weight, target


@pytest.mark.parametrize("gradients", ["backward", "forward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [128256, 50257])
def test_linear_cross_entropy_of_a_whole_vocabulary(vocab: int, dtype: torch.dtype, gradients: Any) -> None:
    """Loss and gradients in several chunks, aligned or odd, are those of torch in float64, within what a rounding of
    logits and gradients leaves."""
    from reference_kernels.linear_cross_entropy import linear_cross_entropy

    x, weight, target = _layer(3000, 512, vocab, dtype)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    upstream = torch.tensor(0.7, device="cuda")

    loss = linear_cross_entropy(x, weight, target, label_smoothing=0.1, gradients=gradients)
    wanted = F.cross_entropy(F.linear(*exact), target, label_smoothing=0.1)
    found, right = (
        torch.autograd.grad(y, leaves, upstream.to(y)) for y, leaves in ((loss, (x, weight)), (wanted, exact))
    )

    # TF32 is off, so float32 is held to float32; bfloat16 logits near 4 are off by 0.008.
    assert abs(float(loss.detach()) / float(wanted.detach()) - 1) < {torch.float32: 1e-6, torch.bfloat16: 1e-4}[dtype]
    limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert max(_off(d, other) for d, other in zip(found, right, strict=True)) < limit


@pytest.mark.parametrize("gradients", ["backward", "forward"])
def test_linear_cross_entropy_takes_less_memory_than_its_logits(gradients: Any) -> None:
    """8192 rows of 4096 by 128256 classes in bfloat16 take 1.5 GiB at most, the weight's gradient of 1 GiB included."""
    from reference_kernels.linear_cross_entropy import linear_cross_entropy

    x, weight, target = _layer(8192, 4096, 128256, torch.bfloat16)
    for _ in range(2):  # the first time cuBLAS takes its workspace
        x.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(x, weight, target, gradients=gradients).backward()
        torch.cuda.synchronize()

    assert torch.cuda.max_memory_allocated() - before < 1.5 * 2**30


def test_linear_cross_entropy_repeats_its_bits() -> None:
    """Two calls, and a second backward through a retained graph, give the same bits, early and late."""
    from reference_kernels.linear_cross_entropy import linear_cross_entropy

    x, weight, target = _layer(3000, 512, 128256, torch.bfloat16)
    for gradients in ("backward", "forward"):
        results = []
        for _ in range(2):
            loss = linear_cross_entropy(x, weight, target, gradients=gradients)  # type: ignore[arg-type]
            both = [torch.autograd.grad(loss, (x, weight), retain_graph=keep) for keep in (True, False)]
            results += [(loss, *found) for found in both]
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 500])
def test_codes_of_a_whole_layer(rows: int, dtype: torch.dtype) -> None:
    """int8 and int4 products of 8192 columns, whole or in parts, are those of the expanded weight in float64 within
    one rounding, and the same bits every time."""
    from reference_kernels.dequant_matmul import int4_linear, int8_linear, quantise_int4, quantise_int8, unpack_int4

    weight = torch.randn(4100, 8192, device="cuda")
    x = torch.randn(rows, 8192, device="cuda").to(dtype)
    codes, scales = quantise_int8(weight)
    packed, steps = quantise_int4(weight)
    pairs = (
        (lambda: int8_linear(x, codes, scales), codes.double() * scales.double()[:, None]),
        (
            lambda: int4_linear(x, packed, steps),
            unpack_int4(packed, 8192).double() * steps.double().repeat_interleave(128, 1),
        ),
    )
    for call, expanded in pairs:
        y = call()
        assert _off(y, F.linear(x.double(), expanded)) < torch.finfo(dtype).eps / 2
        assert torch.equal(y, call())


@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_float8_sums_keep_their_digits(rows: int) -> None:
    """16384 positive products, which tensor cores alone would add up to some 14 bits, are right to a part in 2000."""
    from reference_kernels.dequant_matmul import fp8_linear, quantise_fp8

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8 before capability 8.9")
    (x, x_scales), (codes, scales) = (
        quantise_fp8(torch.rand(size, 16384, device="cuda") + 0.5) for size in (rows, 520)
    )
    wanted = F.linear(x.double() * x_scales.double(), codes.double() * scales.double())

    y = fp8_linear(x, codes, x_scales, scales[:, 0], torch.float32)

    torch.testing.assert_close(y.double(), wanted, rtol=5e-4, atol=0)
