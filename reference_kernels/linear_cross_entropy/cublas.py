"""The products of `linear_cross_entropy`: cuBLAS's, with float32 sums."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_REDUCED = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"


@contextlib.contextmanager
def float32_sums() -> Iterator[None]:
    """Sums of 16-bit products stay in float32, also where cuBLAS splits them.

    By default torch lets it round each part to the 16 bits, which it does to bfloat16 where an output is small: 16 rows
    of 16 columns by 2 classes were two units in the last place off on an H100. The flags are the process's and are put
    back: another thread's products may be more exact meanwhile.
    """
    matmul = torch.backends.cuda.matmul
    allowed = [name for name in _REDUCED if getattr(matmul, name)]
    try:
        for name in allowed:
            setattr(matmul, name, False)
        yield
    finally:
        for name in allowed:
            setattr(matmul, name, True)


def write_logits(logits: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Fill ``logits`` ``(rows, vocab)`` with ``x @ weight.T + bias``."""
    if bias is None:
        torch.mm(x, weight.t(), out=logits)
    else:
        torch.addmm(bias, x, weight.t(), out=logits)


def multiply(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, more: bool = False) -> None:
    """``out = a @ b``, or with ``more`` ``out += a @ b``; stored in the dtype of ``out``: ``a``'s, or float32."""
    options: dict[str, Any] = {}
    if out.dtype != a.dtype:
        if a.device.type == "cuda":
            options = {"out_dtype": out.dtype}
        else:  # torch 2.13 has such products for CUDA alone
            a, b = a.to(out.dtype), b.to(out.dtype)
    if more:
        torch.addmm(out, a, b, out=out, **options)
    else:
        torch.mm(a, b, out=out, **options)


def add_columns(out: torch.Tensor, values: torch.Tensor, more: bool) -> None:
    """``out = values.sum(0)``, or with ``more`` added to what it is; in float32, stored in the dtype of ``out``."""
    sums = values.sum(0, dtype=torch.float32)
    out.copy_(out + sums if more else sums)
