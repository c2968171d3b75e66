"""The specs of sampling: numbers for the whole batch and by row, both cuts, ties, and the draws' distribution."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, dim, optional, tensor, values
from reference_kernels.sampling.kernel import sample
from reference_kernels.sampling.reference import sampling_probabilities

SEED = st.integers(0, 2**31 - 1)
# Not 0.5 and the like, where rounding decides between two sets of equal logits and either is right.
TOP_P = (0.0, 0.37, 0.83, 0.95, 1.0)

SPEC = FusionSpec(
    name="sample",
    fused=sample,
    reference=sampling_probabilities,
    malformed=True,
    strict=True,
    inputs={
        "logits": tensor("*batch vocab"),
        "seed": SEED,
        "temperature": st.sampled_from((1.0, 0.7, 3.0, 0.0)),
        "top_k": st.sampled_from((0, 1, 3, 50)),
        "top_p": st.sampled_from(TOP_P),
        "seen": optional(tensor("*batch vocab", dtype=torch.bool)),
        "penalty": st.sampled_from((1.0, 1.3)),
    },
    dims={"vocab": dim(0, 300)},
    rng="seed",
    distribution=True,
    max_launches=1,
)

BY_ROW = FusionSpec(
    name="sample_by_row",
    fused=sample,
    reference=sampling_probabilities,
    malformed=True,
    strict=True,
    inputs={
        "logits": tensor("rows vocab", values=values.normal(0.0, 2.0)),
        "seed": SEED,
        "temperature": tensor("rows", dtype=torch.float32, values=values.uniform(0.0, 2.0)),
        "top_k": tensor("rows", dtype=torch.int64, values=values.integers(0, 90)),
        "top_p": tensor("rows", dtype=torch.float32, values=values.uniform(0.3, 1.1)),
    },
    dims={"rows": dim(0, 40), "vocab": dim(1, 300)},
    rng="seed",
    distribution=True,
    max_launches=1,
)

# Vocabularies that are interpreted too slowly: several tiles, floors that leave few of many.
FULL = FusionSpec(
    name="sample_full",
    fused=sample,
    reference=sampling_probabilities,
    malformed=True,
    strict=True,
    inputs={
        "logits": tensor("rows vocab", values=values.normal(0.0, 2.0)),
        "seed": SEED,
        "temperature": st.sampled_from((0.7, 1.0)),
        "top_k": st.sampled_from((50, 0, 3000)),
        "top_p": st.sampled_from((1.0, 0.95, 0.37)),
    },
    dims={"rows": dim(1, 256), "vocab": dim(1000, 131072)},
    rng="seed",
    distribution=True,
    max_launches=1,
    bench=[
        {"rows": 256, "vocab": 128256, "top_k": top_k, "top_p": top_p, "temperature": 0.7, "dtype": torch.float32}
        for top_k, top_p in ((50, 0.95), (0, 0.95), (0, 1.0))
    ],
    requires="cuda",
)

SPECS = [SPEC, BY_ROW, FULL]
