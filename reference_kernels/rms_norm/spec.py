"""How rms_norm is tested: the three casting conventions, each against its own reference."""

from __future__ import annotations

from functools import partial

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, dim, optional, tensor
from reference_kernels.rms_norm.kernel import rms_norm
from reference_kernels.rms_norm.reference import gemma_reference, llama_reference, torch_reference

EPS = st.sampled_from((1e-6, 1e-5, 1e-2))

SPEC = FusionSpec(
    name="rms_norm_llama",
    fused=partial(rms_norm, convention="llama"),
    reference=llama_reference,
    inputs={"x": tensor("*batch n"), "weight": tensor("n"), "eps": EPS},
    max_launches=1,
    bench=[{"batch": (8192,), "n": 8192}],
)

GEMMA = FusionSpec(
    name="rms_norm_gemma",
    fused=partial(rms_norm, convention="gemma"),
    reference=gemma_reference,
    inputs={"x": tensor("rows n"), "weight": tensor("n"), "eps": EPS},
    invariant="rows",
    max_launches=1,
    bench=[{"rows": 8192, "n": 8192}],
)

TORCH = FusionSpec(
    name="rms_norm_torch",
    fused=partial(rms_norm, convention="torch"),
    reference=torch_reference,
    inputs={
        "x": tensor("*batch n"),
        "weight": optional(tensor("n", dtype=(torch.float32, torch.bfloat16))),
        "eps": EPS,
    },
    max_launches=1,
    bench=[{"batch": (8192,), "n": 8192}],
)

# Interpreted tiles hold 128 columns, so the specs above loop there; on a GPU only rows past 16384 do.
LONG = FusionSpec(
    name="rms_norm_long",
    fused=partial(rms_norm, convention="llama"),
    reference=llama_reference,
    inputs={"x": tensor("rows n"), "weight": tensor("n"), "eps": EPS},
    dims={"rows": dim(0, 8), "n": dim(16385, 40000)},
    max_launches=1,
    requires="cuda",
)

SPECS = [SPEC, GEMMA, TORCH, LONG]
