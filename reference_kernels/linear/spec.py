"""How linear is tested: any rank, layout and tail, with each activation, with and without bias."""

from __future__ import annotations

from hypothesis import strategies as st

from pytest_fusion import FusionSpec, dim, optional, tensor
from reference_kernels.linear.kernel import linear
from reference_kernels.linear.reference import linear_reference

ACTIVATION = st.sampled_from((None, "relu", "gelu", "silu"))

SPEC = FusionSpec(
    name="linear",
    fused=linear,
    reference=linear_reference,
    inputs={
        "x": tensor("*batch k"),
        "weight": tensor("n k"),
        "bias": optional(tensor("n")),
        "activation": ACTIVATION,
    },
    max_launches=1,
    bench=[{"batch": (8192,), "n": 8192, "k": 8192}, {"batch": (16384,), "n": 8192, "k": 512}],
)

# Results of 96 tiles of 128 x 256 or more take the large tile, which no small case reaches.
LARGE = FusionSpec(
    name="linear_large",
    fused=linear,
    reference=linear_reference,
    inputs={
        "x": tensor("rows k"),
        "weight": tensor("n k"),
        "bias": optional(tensor("n")),
        "activation": ACTIVATION,
    },
    dims={"rows": dim(2080, 2200), "n": dim(2080, 2200), "k": dim(0, 200)},
    max_launches=1,
    requires="cuda",
)

SPECS = [SPEC, LARGE]
