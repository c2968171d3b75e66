"""Full precision of matrix products while a reference runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """TF32 and reduced-precision accumulation off, and back as they were afterwards.

    A float32 reference that silently reads 10 bits of its inputs (cuDNN convolutions do by default) would excuse a
    kernel that does the same.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (
        torch.get_float32_matmul_precision(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
        cudnn.allow_tf32,
    )
    try:
        torch.set_float32_matmul_precision("highest")
        matmul.allow_bf16_reduced_precision_reduction = False
        matmul.allow_fp16_reduced_precision_reduction = False
        cudnn.allow_tf32 = False
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        matmul.allow_bf16_reduced_precision_reduction = before[1]
        matmul.allow_fp16_reduced_precision_reduction = before[2]
        cudnn.allow_tf32 = before[3]
