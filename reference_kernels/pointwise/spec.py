"""The specs of pointwise: any rank and layout, every activation, masks by seed, with gradients."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, tensor
from reference_kernels.pointwise.kernel import add_mul_act, relu_scale_bias
from reference_kernels.pointwise.reference import add_mul_act_reference, dropout_reference, relu_scale_bias_reference
from reference_kernels.pointwise.seeded_dropout import dropout

VECTOR = (torch.float32, torch.bfloat16)

SPEC = FusionSpec(
    name="relu_scale_bias",
    fused=relu_scale_bias,
    reference=relu_scale_bias_reference,
    malformed=True,
    strict=True,
    inputs={"x": tensor("rows n"), "scale": tensor("n"), "bias": tensor("n", dtype=VECTOR)},
    grad=True,
    invariant="rows",
    max_launches=1,
    bench=[{"rows": 8192, "n": 8192}],
)

RANKS = FusionSpec(
    name="relu_scale_bias_any_rank",
    fused=relu_scale_bias,
    reference=relu_scale_bias_reference,
    malformed=True,
    strict=True,
    inputs={"x": tensor("*batch n"), "scale": tensor("n", dtype=VECTOR), "bias": tensor("n")},
    grad=True,
    max_launches=1,
)

ADD_MUL_ACT = FusionSpec(
    name="add_mul_act",
    fused=add_mul_act,
    reference=add_mul_act_reference,
    malformed=True,
    strict=True,
    inputs={
        **{name: tensor("*batch n") for name in ("x", "y", "z")},
        "activation": st.sampled_from(("relu", "gelu", "silu")),
    },
    grad=True,
    max_launches=1,
    bench=[{"batch": (8192,), "n": 8192, "activation": "gelu"}],
)

DROPOUT = FusionSpec(
    name="dropout",
    fused=dropout,
    reference=dropout_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("*batch n"),
        "seed": st.integers(0, 2**63 - 1),
        "p": st.sampled_from((0.1, 0.5, 0.0, 1.0)),
    },
    grad=True,
    rng="seed",
    max_launches=1,
    bench=[{"batch": (8192,), "n": 8192, "seed": 20261122, "p": 0.1}],
)

SPECS = [SPEC, RANKS, ADD_MUL_ACT, DROPOUT]
