"""AdaSplash: alpha-entmax by bisection or by a histogram, and attention with it."""

# ruff: noqa: PLW0108 - the names of the lambdas' parameters are those of the inputs
from __future__ import annotations

import importlib
import os

import torch
from torch import Tensor

from pytest_fusion import derived, dim, tensor
from tests.outside.census.entry import Kernel, kernel

UNFINISHED = {"low-precision-accumulation": "AdaSplash 0.2.2: `triton_sparsemax` does not sum to 1"}
NOT_COMPILED = "AdaSplash 0.2.2: the backward of entmax by bisection does not compile in 16 bits"
SQUARE_ROOT = "AdaSplash 0.2.2: the backward of entmax by a histogram does not compile in 16 bits"
FROZEN = {"raises": "AdaSplash 0.2.2: no gradients where the queries need none"}
LARGE = dict.fromkeys(
    ("low-precision-accumulation", "missing-max-subtraction", "eps-misplaced", "unexplained"),
    "AdaSplash 0.2.2: entmax of large scores does not sum to 1",
)


def sparsemax(x: Tensor) -> Tensor:
    """Martins and Astudillo, ICML 2016, equations 4 to 6. What is 0 is outside of the support: no gradient."""
    ordered = x.sort(-1, descending=True).values
    ranks = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    size = (1 + ranks * ordered > ordered.cumsum(-1)).sum(-1, keepdim=True)
    if not bool(size.all()):
        raise ValueError("rounding, or NaN, leaves nothing in the support")
    threshold = (ordered.cumsum(-1).gather(-1, size - 1) - 1) / size
    return (x - threshold).relu()


def entmax15(x: Tensor) -> Tensor:
    """Peters et al., "Sparse Sequence-to-Sequence Models", algorithm 2: exact for alpha 1.5."""
    x = (x - x.max(-1, keepdim=True).values) / 2
    ordered = x.sort(-1, descending=True).values
    ranks = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    mean = ordered.cumsum(-1) / ranks
    spread = ranks * (ordered.square().cumsum(-1) / ranks - mean.square())
    threshold = mean - ((1 - spread) / ranks).clamp(min=0).sqrt()
    size = (threshold <= ordered).sum(-1, keepdim=True)
    if not bool(size.all()):
        raise ValueError("rounding, or NaN, leaves nothing in the support")
    return (x - threshold.gather(-1, size - 1)).clamp(min=0).square()


def whole(batch: int, seq: int, q: Tensor) -> Tensor:
    """The lengths of sequences that are all in use; without them a length is a power of two."""
    return torch.full((batch,), seq, dtype=torch.int32, device=q.device)


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return entmax15(scores) @ v


def kernels() -> list[Kernel]:
    from adasplash import adasplash_no_block_mask, triton_entmax15, triton_entmax_v1
    from adasplash import triton_sparsemax as sparse

    # Its modules, which the first call imports, leave their tuning out where this is "1", and then lack block sizes.
    # Triton reads both words alike.
    if os.environ.get("TRITON_INTERPRET") == "1":
        os.environ["TRITON_INTERPRET"] = "true"
    for module in ("triton_entmax", "triton_entmax_v2", "adasplash_no_block_mask"):
        importlib.import_module(f"adasplash.{module}")

    rows = {"rows": dim(1), "n": dim(1, 4096)}
    x = {"x": tensor("rows n")}
    return [
        kernel("triton_entmax_v1", lambda x: triton_entmax_v1(x), entmax15, x, dims=rows, grad=True,
               proved={**dict.fromkeys(("raises", "does-not-compile"), NOT_COMPILED), **LARGE}),
        kernel("triton_entmax15", lambda x: triton_entmax15(x), entmax15, x, dims=rows, grad=True,
               proved={**dict.fromkeys(("raises", "does-not-compile"), SQUARE_ROOT), **LARGE}),
        kernel("triton_sparsemax", lambda x: sparse(x), sparsemax, x, dims=rows, grad=True, proved=UNFINISHED),
        kernel("adasplash_no_block_mask", lambda q, k, v, lengths:
               adasplash_no_block_mask(q, k, v, varlen=lengths), attention,
               {**{name: tensor("batch heads seq size") for name in "qkv"}, "lengths": derived(whole)},
               dims={"batch": dim(1, 2), "heads": dim(1, 3), "seq": dim(1, 100), "size": dim(16, 64, multiple_of=16)},
               grad=True, proved={**FROZEN, **LARGE}),
    ]  # fmt: skip
