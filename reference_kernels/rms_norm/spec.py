"""The specs of rms_norm: any rank and layout, every convention, with and without a residual; with gradients."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, dim, optional, tensor
from reference_kernels.rms_norm.kernel import add_rms_norm, rms_norm
from reference_kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference

EPS = st.sampled_from((1e-6, 1e-5, 1e-2))
WIDTHS = ((131072, 1024), (16384, 8192), (8192, 8192), (2048, 65536))

SPEC = FusionSpec(
    name="rms_norm",
    fused=rms_norm,
    reference=rms_norm_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("*batch n"),
        "weight": optional(tensor("n")),
        "eps": EPS,
        "convention": st.sampled_from(("llama", "gemma", "torch")),
    },
    grad=True,
    max_launches=1,
    bench=[{"batch": (rows,), "n": n, "convention": "llama"} for rows, n in WIDTHS],
)

ADD = FusionSpec(
    name="add_rms_norm",
    fused=add_rms_norm,
    reference=add_rms_norm_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("rows n"),
        "residual": tensor("rows n"),
        "weight": tensor("n", dtype=(torch.float32, torch.bfloat16)),
        "eps": EPS,
        "convention": st.sampled_from(("gemma", "torch")),
    },
    grad=True,
    invariant="rows",
    max_launches=1,
    bench=[{"rows": rows, "n": n, "convention": "torch"} for rows, n in WIDTHS],
)

# Interpreted tiles hold 128 columns, so the specs above loop there; on a GPU rows past 8192 do backward, past 16384
# forward.
LONG = FusionSpec(
    name="rms_norm_long",
    fused=rms_norm,
    reference=rms_norm_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("rows n"),
        "weight": tensor("n"),
        "eps": EPS,
        "convention": st.sampled_from(("llama", "gemma")),
    },
    dims={"rows": dim(0, 70), "n": dim(8193, 40000)},
    grad=True,
    max_launches=1,
    requires="cuda",
)

SPECS = [SPEC, ADD, LONG]
