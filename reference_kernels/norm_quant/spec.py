"""The specs of norm_quant: both norms, both kinds of codes, scales by row and by group, with and without residual."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, dim, optional, tensor
from reference_kernels.norm_quant.kernel import add_norm_quant, norm_quant
from reference_kernels.norm_quant.reference import add_norm_quant_reference, norm_quant_reference

VECTOR = (torch.float32, torch.bfloat16)
CHOICES = {
    "eps": st.sampled_from((1e-6, 1e-2)),
    "norm": st.sampled_from(("rms", "layer")),
    "codes": st.sampled_from(("fp8", "int8")),
    "group": st.sampled_from((None, 16, 128)),
}
MEASURED = [
    {"rows": 16384, "n": 8192, "eps": 1e-6, "norm": "rms", "codes": codes, "group": group}
    for codes in ("fp8", "int8")
    for group in (None, 128)
]

SPEC = FusionSpec(
    name="norm_quant",
    fused=norm_quant,
    reference=norm_quant_reference,
    malformed=True,
    strict=True,
    inputs={"x": tensor("rows n"), "weight": tensor("n"), "bias": optional(tensor("n", dtype=VECTOR)), **CHOICES},
    invariant="rows",
    max_launches=1,
    bench=MEASURED,
)

RESIDUAL = FusionSpec(
    name="add_norm_quant",
    fused=add_norm_quant,
    reference=add_norm_quant_reference,
    malformed=True,
    strict=True,
    inputs={"x": tensor("rows n"), "residual": tensor("rows n"), "weight": tensor("n", dtype=VECTOR), **CHOICES},
    invariant="rows",
    max_launches=1,
    bench=MEASURED[:2],
)

RANKS = FusionSpec(
    name="norm_quant_any_rank",
    fused=add_norm_quant,
    reference=add_norm_quant_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("*batch n"),
        "residual": tensor("*batch n"),
        "weight": tensor("n"),
        "bias": optional(tensor("n")),
        **CHOICES,
    },
    max_launches=1,
)

# Interpreted, rows past 16 elements loop; on a GPU only those past 16384 do.
LONG = SPEC.with_(name="norm_quant_long", dims={"rows": dim(0, 8), "n": dim(16385, 40000)}, requires="cuda", bench=[])

SPECS = [SPEC, RESIDUAL, RANKS, LONG]
