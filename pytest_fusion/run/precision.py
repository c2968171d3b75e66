"""The precision of torch's own products while a reference and a kernel run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

_MATMUL: Any = torch.backends.cuda.matmul
_CUDNN: Any = torch.backends.cudnn
_MKLDNN: Any = torch.backends.mkldnn
# By torch's newer name of a precision: "none" is the default, which is "ieee".
_FULL = ("ieee", "none")


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute products in full precision while a reference runs; every setting is restored afterwards. A float32
    reference with 10 bits of its inputs (cuDNN's default in convolutions) would excuse a kernel with as few."""
    with default_precision(), ExitStack() as undo:
        # The older name first, while it can be read: it does not follow settings by the newer ones.
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
    """Switch off the reduced precision that torch uses by default, while a kernel runs. cuBLAS rounds each part of a
    split sum to bfloat16 (sums of 16 terms in two columns were two units in the last place off on an H100), and cuDNN
    convolves in TF32: by default a kernel that calls torch is as wrong as the unfused code. Settings that the user
    changed, such as TF32 in products, hold for the kernel."""
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
