"""The specs of moe_gate: any rank and layout, one expert up to hundreds, all of them chosen, with gradients."""

from __future__ import annotations

from hypothesis import strategies as st

from pytest_fusion import FusionSpec, derived, dim, tensor
from reference_kernels.moe_gate.kernel import moe_gate
from reference_kernels.moe_gate.reference import moe_gate_reference

K = derived(lambda chosen: chosen)
DIMS = {"chosen": dim(0, 12), "rest": dim(0, 300)}

SPEC = FusionSpec(
    name="moe_gate",
    fused=moe_gate,
    reference=moe_gate_reference,
    malformed=True,
    strict=True,
    inputs={"logits": tensor("tokens chosen+rest"), "k": K, "renormalize": st.booleans()},
    dims=DIMS,
    grad=True,
    invariant="tokens",
    max_launches=1,
    bench=[{"tokens": 32768, "chosen": 8, "rest": 248, "renormalize": True}],
)

RANKS = FusionSpec(
    name="moe_gate_any_rank",
    fused=moe_gate,
    reference=moe_gate_reference,
    malformed=True,
    strict=True,
    inputs={"logits": tensor("*batch chosen+rest"), "k": K, "renormalize": True},
    dims=DIMS,
    grad=True,
    max_launches=1,
)

SPECS = [SPEC, RANKS]
