"""How rope is tested: any rank and layout, whole and partial heads, tables shared by a batch, with gradients."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, dim, tensor
from reference_kernels.rope.kernel import rope
from reference_kernels.rope.reference import rope_reference

LAYOUT = st.sampled_from(("half", "interleaved"))
ANGLES = (torch.float32, torch.bfloat16)
# Interpreted programs take 256 pairs, so heads of this number and size are already more than one program's.
DIMS = {"q_heads": dim(0, 10), "k_heads": dim(0, 10), "half": dim(0, 40), "rest": dim(0, 40)}

SPEC = FusionSpec(
    name="rope",
    fused=rope,
    reference=rope_reference,
    inputs={
        "q": tensor("batch tokens q_heads 2*half+rest"),
        "k": tensor("batch tokens k_heads 2*half+rest"),
        "cos": tensor("tokens half", dtype=ANGLES),
        "sin": tensor("tokens half", dtype=ANGLES),
        "layout": LAYOUT,
    },
    dims={"batch": dim(0, 4), "tokens": dim(0, 64), **DIMS},
    grad=("q", "k"),
    invariant="tokens",
    max_launches=1,
)

# Few cases of any size, and those that are measured.
FULL = SPEC.with_(
    name="rope_full",
    dims={"half": dim(0, 256), "rest": dim(0, 512)},  # a head has at most 1024 dimensions
    bench=[
        {"batch": batch, "tokens": 4096, "q_heads": 32, "k_heads": 8, "half": 64, "rest": 0, "layout": "half"}
        for batch in (8, 4)
    ],
)

RANKS = FusionSpec(
    name="rope_any_rank",
    fused=rope,
    reference=rope_reference,
    inputs={
        "q": tensor("*batch q_heads 2*half"),
        "k": tensor("*batch k_heads 2*half"),
        "cos": tensor("*batch half", dtype=ANGLES),
        "sin": tensor("*batch half", dtype=ANGLES),
        "layout": LAYOUT,
    },
    dims={name: DIMS[name] for name in ("q_heads", "k_heads", "half")},
    grad=("q", "k"),
    max_launches=1,
)

SPECS = [SPEC, FULL, RANKS]
