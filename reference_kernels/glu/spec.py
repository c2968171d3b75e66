"""How glu is tested: separate halves and packed ones of any rank and layout, every activation, with gradients."""

from __future__ import annotations

from hypothesis import strategies as st

from pytest_fusion import FusionSpec, tensor
from reference_kernels.glu.kernel import glu, glu_packed
from reference_kernels.glu.reference import glu_packed_reference, glu_reference

ACTIVATION = st.sampled_from(("silu", "gelu", "gelu_tanh"))

SPEC = FusionSpec(
    name="glu",
    fused=glu,
    reference=glu_reference,
    inputs={"gate": tensor("*batch hidden"), "up": tensor("*batch hidden"), "activation": ACTIVATION},
    grad=True,
    max_launches=1,
    bench=[{"batch": (16384,), "hidden": 14336}, {"batch": (8192,), "hidden": 14336}],
)

PACKED = FusionSpec(
    name="glu_packed",
    fused=glu_packed,
    reference=glu_packed_reference,
    inputs={"x": tensor("rows 2*hidden"), "activation": ACTIVATION},
    grad=True,
    invariant="rows",
    max_launches=1,
    bench=[{"rows": 16384, "hidden": 14336}],
)

SPECS = [SPEC, PACKED]
