"""The specs of layer_norm: any rank and layout, with and without weight, bias and residual, with gradients."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, dim, optional, tensor
from reference_kernels.layer_norm.kernel import add_layer_norm, layer_norm
from reference_kernels.layer_norm.reference import add_layer_norm_reference, layer_norm_reference

EPS = st.sampled_from((1e-5, 1e-6, 1e-2))
MIXED = (torch.float32, torch.bfloat16)
WIDTHS = ((131072, 1024), (16384, 8192), (8192, 8192), (2048, 65536))

SPEC = FusionSpec(
    name="layer_norm",
    fused=layer_norm,
    reference=layer_norm_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("rows n"),
        "weight": optional(tensor("n", dtype=MIXED)),
        "bias": optional(tensor("n", dtype=MIXED)),
        "eps": EPS,
    },
    grad=True,
    invariant="rows",
    max_launches=1,
    bench=[{"rows": rows, "n": n} for rows, n in WIDTHS],
)

ADD = FusionSpec(
    name="add_layer_norm",
    fused=add_layer_norm,
    reference=add_layer_norm_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("*batch n"),
        "residual": tensor("*batch n"),
        "weight": tensor("n"),
        "bias": tensor("n"),
        "eps": EPS,
    },
    grad=True,
    max_launches=1,
    bench=[{"batch": (rows,), "n": n} for rows, n in WIDTHS],
)

# Interpreted tiles hold 128 columns, so the specs above loop there; on a GPU rows past 8192 do backward, past 16384
# forward.
LONG = FusionSpec(
    name="layer_norm_long",
    fused=layer_norm,
    reference=layer_norm_reference,
    malformed=True,
    strict=True,
    inputs={"x": tensor("rows n"), "weight": tensor("n"), "bias": tensor("n"), "eps": EPS},
    dims={"rows": dim(0, 70), "n": dim(8193, 40000)},
    grad=True,
    max_launches=1,
    requires="cuda",
)

SPECS = [SPEC, ADD, LONG]
