"""The precision of torch's own products while a reference and a kernel run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

_MATMUL: Any = torch.backends.cuda.matmul
_CUDNN: Any = torch.backends.cudnn
_MKLDNN: Any = torch.backends.mkldnn
# Of a precision by its newer name: "none" is what nobody chose, and is "ieee".
_FULL = ("ieee", "none")


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute products in full precision while a reference runs; every setting is restored afterwards.

    A float32 reference that silently reads 10 bits of its inputs (cuDNN convolutions do by default) would excuse a
    kernel that does the same.
    """
    with default_precision(), ExitStack() as undo:
        # The older name first, which can be read meanwhile then; it does not know what the newer ones have set.
        with suppress(RuntimeError):
            before = torch.get_float32_matmul_precision()
            if before != "highest":
                undo.callback(torch.set_float32_matmul_precision, before)
                torch.set_float32_matmul_precision("highest")
        _off(undo, _MATMUL, "allow_fp16_accumulation")
        for operations in (_MATMUL, _MKLDNN.matmul, _MKLDNN.conv, _MKLDNN.rnn):
            _in_full(undo, operations)
        yield


@contextmanager
def default_precision() -> Iterator[None]:
    """Switch off the reduced precision that torch uses by default, while a kernel runs.

    Where cuBLAS splits a sum it rounds each part to bfloat16 (sums of 16 terms in two columns were two units in the
    last place off on an H100), and cuDNN convolves in TF32. By these settings of the process a kernel that calls torch
    is as wrong as the unfused code. What somebody chose, such as TF32 in products, holds for the kernel.
    """
    with ExitStack() as undo:
        _off(undo, _MATMUL, "allow_bf16_reduced_precision_reduction")
        _off(undo, _MATMUL, "allow_fp16_reduced_precision_reduction")
        with suppress(RuntimeError):
            _off(undo, _CUDNN, "allow_tf32")
        for operations in (_CUDNN.conv, _CUDNN.rnn):
            _in_full(undo, operations)
        yield


def _off(undo: ExitStack, owner: Any, name: str) -> None:
    if getattr(owner, name):
        undo.callback(setattr, owner, name, True)
        setattr(owner, name, False)


def _in_full(undo: ExitStack, operations: Any) -> None:
    before = operations.fp32_precision
    if before not in _FULL:
        undo.callback(setattr, operations, "fp32_precision", before)
        operations.fp32_precision = "ieee"
