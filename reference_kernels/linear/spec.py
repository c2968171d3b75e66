"""The specs of linear: any rank, layout and tail, each activation, three projections, gates, low-rank factors."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, dim, optional, tensor
from reference_kernels.linear.gate_up import gate_up_linear
from reference_kernels.linear.kernel import linear
from reference_kernels.linear.lora import lora_linear
from reference_kernels.linear.qkv import qkv_linear
from reference_kernels.linear.reference import (
    gate_up_linear_reference,
    linear_reference,
    lora_linear_reference,
    qkv_linear_reference,
)

PROJECTIONS = {"query": "n", "key": "kv", "value": "kv"}
ACTIVATION = st.sampled_from((None, "relu", "gelu", "silu"))

SPEC = FusionSpec(
    name="linear",
    fused=linear,
    reference=linear_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("*batch k"),
        "weight": tensor("n k"),
        "bias": optional(tensor("n")),
        "activation": ACTIVATION,
    },
    max_launches=1,
    bench=[{"batch": (8192,), "n": 8192, "k": 8192}, {"batch": (16384,), "n": 8192, "k": 512}],
)

# Grouped queries: keys and values are narrower.
QKV = FusionSpec(
    name="qkv_linear",
    fused=qkv_linear,
    reference=qkv_linear_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("*batch k"),
        **{f"{name}_weight": tensor(f"{width} k") for name, width in PROJECTIONS.items()},
        **{f"{name}_bias": tensor(width) for name, width in PROJECTIONS.items()},
    },
    grad=True,
    max_launches=1,
    bench=[{"batch": (rows,), "k": 4096, "n": 4096, "kv": 1024} for rows in (1, 16, 64)],
)

GATE_UP = FusionSpec(
    name="gate_up_linear",
    fused=gate_up_linear,
    reference=gate_up_linear_reference,
    malformed=True,
    strict=True,
    inputs={"x": tensor("*batch k"), "gate_weight": tensor("n k"), "up_weight": tensor("n k")},
    grad=True,
    max_launches=1,
    bench=[{"batch": (8192,), "n": 14336, "k": 4096}],
)

LORA = FusionSpec(
    name="lora_linear",
    fused=lora_linear,
    reference=lora_linear_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("*batch k"),
        "weight": tensor("n k"),
        "down": tensor("r k"),
        "up": tensor("n r"),
        "scale": st.sampled_from((1.0, 2.0, 0.3)),
    },
    dims={"r": dim(0, 40)},
    grad=True,
    max_launches=2,
    bench=[{"batch": (rows,), "n": 4096, "k": 4096, "r": 16, "scale": 2.0} for rows in (4096, 8192)],
)

# Results of 96 tiles of 128 x 256 or more take the large tile, which no small case reaches.
LARGE = FusionSpec(
    name="linear_large",
    fused=linear,
    reference=linear_reference,
    malformed=True,
    strict=True,
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

# Rows of whole 16 bytes have descriptors; on a GPU they are taken for large results alone.
EIGHTS = {"k": dim(8, 200, multiple_of=8), "n": dim(8, 136, multiple_of=8)}
HALVES = (torch.float16, torch.bfloat16)
DESCRIBED = SPEC.with_(name="linear_described", dims=EIGHTS, dtypes=HALVES, bench=())
DESCRIBED_LORA = LORA.with_(
    name="lora_linear_described", dims={**EIGHTS, "r": dim(8, 40, multiple_of=8)}, dtypes=HALVES, bench=()
)
DESCRIBED_QKV = QKV.with_(
    name="qkv_linear_described", dims={**EIGHTS, "kv": dim(8, 72, multiple_of=8)}, dtypes=HALVES, bench=()
)
DESCRIBED_GATE_UP = GATE_UP.with_(name="gate_up_linear_described", dims=EIGHTS, dtypes=HALVES, bench=())
LARGE_DESCRIBED = LARGE.with_(
    name="linear_large_described",
    dims={"rows": dim(2080, 2200), "n": dim(2080, 2200, multiple_of=8), "k": EIGHTS["k"]},
    dtypes=HALVES,
)

PLAIN = [SPEC, QKV, GATE_UP, LORA, LARGE]
SPECS = [*PLAIN, DESCRIBED, DESCRIBED_QKV, DESCRIBED_LORA, DESCRIBED_GATE_UP, LARGE_DESCRIBED]
