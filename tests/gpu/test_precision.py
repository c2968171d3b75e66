"""Kernels that call torch's products on a GPU, whose defaults round sums to bfloat16 and inputs to TF32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytest_fusion import FusionFailure, check_equivalent

pytestmark = pytest.mark.gpu


def _layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ weight.t())


def _fused(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, weight.t()).clamp_min_(0)


def _sums_in_bfloat16(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Asks for what torch allows itself by default."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = True
    out = _fused(x, weight)
    matmul.allow_bf16_reduced_precision_reduction = before
    return out


def _operands(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the layout and sizes where cuBLAS split the sums on an H100 (torch 2.11, CUDA 13.0)."""
    generator = torch.Generator("cuda").manual_seed(columns)
    x = torch.randn(16, 32, generator=generator, device="cuda").bfloat16()
    return x, torch.randn(columns, 1, generator=generator, device="cuda").bfloat16().expand(columns, 32)


@pytest.mark.parametrize("columns", [2, 4, 140])
def test_a_product_of_torch_is_not_accused_of_its_default(columns: int) -> None:
    """With parts of sums in bfloat16, as torch has it by default, its own layer was two units in the last place off."""
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    check_equivalent(_fused, _layer, *_operands(columns))


def test_a_kernel_that_asks_for_sums_in_bfloat16_is_caught() -> None:
    """What a kernel chooses is its own."""
    with pytest.raises(FusionFailure, match="further off"):
        check_equivalent(_sums_in_bfloat16, _layer, *_operands(140))


def test_a_convolution_of_torch_is_not_accused_of_its_default() -> None:
    """Which is TF32, 10 bits of each float32."""
    assert torch.backends.cudnn.allow_tf32
    x, weight = torch.randn(4, 64, 24, 24, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda")
    check_equivalent(
        lambda x, weight: F.conv2d(x, weight, padding=1).relu_(),
        lambda x, weight: torch.relu(F.conv2d(x, weight, padding=1)),
        x,
        weight,
    )
