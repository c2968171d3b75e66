"""Apple's cut-cross-entropy. Gradients below a threshold are dropped by default; ``filter_eps=None`` keeps them."""

# ruff: noqa: PLW0108 - the names of the lambdas' parameters are those of the inputs
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_fusion import derived, dim, tensor
from tests.outside.census import formulas
from tests.outside.census.entry import Kernel, kernel


def loss(e: Tensor, c: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(e @ c.T, target).float()


def log_sum_exp(e: Tensor, c: Tensor) -> Tensor:
    return (e @ c.T).float().logsumexp(-1)


def kernels() -> list[Kernel]:
    from cut_cross_entropy import linear_cross_entropy
    from cut_cross_entropy.cce_lse_forward import cce_lse_forward_kernel

    halves = (torch.float16, torch.bfloat16)
    inputs = {"e": tensor("rows hidden"), "c": tensor("vocab hidden"), "target": derived(formulas.labels)}
    dims = {"rows": dim(1, 100), "hidden": dim(1, 64), "vocab": dim(1, 300)}
    return [
        kernel("linear_cross_entropy", lambda e, c, target: linear_cross_entropy(e, c, target, impl="cce"), loss,
               inputs, wide=(0,), dims=dims, dtypes=halves),
        kernel("linear_cross_entropy, backward, no filter", lambda e, c, target:
               linear_cross_entropy(e, c, target, filter_eps=None, impl="cce"), loss, inputs, wide=(0,),
               dims=dims, dtypes=halves, grad=True, deterministic={"de": False, "dc": False}),
        kernel("cce_lse_forward", lambda e, c: cce_lse_forward_kernel(e, c), log_sum_exp,
               {"e": tensor("rows hidden"), "c": tensor("vocab hidden")}, wide=(0,), dims=dims, dtypes=halves),
    ]  # fmt: skip
