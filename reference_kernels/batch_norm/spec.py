"""The specs of batch_norm: training and evaluation, channels first and last, residual and relu, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, dim, optional, tensor, values
from reference_kernels.batch_norm.kernel import batch_norm
from reference_kernels.batch_norm.reference import batch_norm_reference

VECTOR = (torch.float32, torch.bfloat16)
RUNNING = {
    "running_mean": tensor("channels", dtype=torch.float32, values=values.normal()),
    "running_var": tensor("channels", dtype=torch.float32, values=values.positive(0.1, 4.0)),
}
# A single value a channel is refused in training.
DIMS = {"batch": dim(2, 6), "channels": dim(0, 20), "height": dim(0, 8), "width": dim(0, 8)}
GRAD = ("x", "weight", "bias", "residual")

SPEC = FusionSpec(
    name="batch_norm",
    fused=batch_norm,
    reference=batch_norm_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("batch channels height width"),
        "weight": optional(tensor("channels", dtype=VECTOR)),
        "bias": tensor("channels"),
        **RUNNING,
        "residual": optional(tensor("batch channels height width")),
        "relu": st.booleans(),
    },
    dims=DIMS,
    mutates=tuple(RUNNING),
    grad=GRAD,
    max_launches=3,
)


def _last(x: torch.Tensor, residual: torch.Tensor, **more: Any) -> torch.Tensor:
    """The kernel of ``(batch, height, width, channels)``, seen with the channels second."""
    return batch_norm(x.movedim(-1, 1), residual=residual.movedim(-1, 1), **more).movedim(1, -1)


def _last_reference(x: torch.Tensor, residual: torch.Tensor, **more: Any) -> torch.Tensor:
    return batch_norm_reference(x.movedim(-1, 1), residual=residual.movedim(-1, 1), **more).movedim(1, -1)


CHANNELS_LAST = SPEC.with_(
    name="batch_norm_channels_last",
    fused=_last,
    reference=_last_reference,
    inputs={
        "x": tensor("batch height width channels"),
        "weight": tensor("channels"),
        "bias": tensor("channels", dtype=VECTOR),
        **RUNNING,
        "residual": tensor("batch height width channels"),
        "relu": st.booleans(),
    },
)

EVALUATION = FusionSpec(
    name="batch_norm_evaluation",
    fused=batch_norm,
    reference=batch_norm_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("batch channels length"),
        "weight": tensor("channels"),
        "bias": optional(tensor("channels")),
        **RUNNING,
        "residual": optional(tensor("batch channels length")),
        "relu": True,
        "training": False,
    },
    dims={"batch": dim(0, 20), "channels": dim(0, 40), "length": dim(0, 300)},
    grad=GRAD,
    invariant="batch",
    max_launches=1,
)

# Of any size, and those that are measured: interpreted, elements by the million take minutes.
FULL = SPEC.with_(
    name="batch_norm_full",
    dims={"batch": dim(2)},
    requires="cuda",
    bench=[
        {"batch": 64, "channels": 256, "height": 56, "width": 56, "relu": True, "dtype": dtype}
        for dtype in (torch.bfloat16, torch.float32)
    ],
)

SPECS = [SPEC, CHANNELS_LAST, EVALUATION, FULL]
