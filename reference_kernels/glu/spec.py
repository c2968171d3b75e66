"""The specs of glu: separate halves and packed ones of any rank and layout, every activation, and the feed-forward
block, all with gradients."""

from __future__ import annotations

from hypothesis import strategies as st

from pytest_fusion import FusionSpec, tensor
from reference_kernels.glu.block import feed_forward
from reference_kernels.glu.kernel import glu, glu_packed
from reference_kernels.glu.reference import feed_forward_reference, glu_packed_reference, glu_reference

ACTIVATION = st.sampled_from(("silu", "gelu", "gelu_tanh"))

SPEC = FusionSpec(
    name="glu",
    fused=glu,
    reference=glu_reference,
    malformed=True,
    strict=True,
    inputs={"gate": tensor("*batch hidden"), "up": tensor("*batch hidden"), "activation": ACTIVATION},
    grad=True,
    max_launches=1,
    bench=[{"batch": (16384,), "hidden": 14336}, {"batch": (8192,), "hidden": 14336}],
)

PACKED = FusionSpec(
    name="glu_packed",
    fused=glu_packed,
    reference=glu_packed_reference,
    malformed=True,
    strict=True,
    inputs={"x": tensor("rows 2*hidden"), "activation": ACTIVATION},
    grad=True,
    invariant="rows",
    max_launches=1,
    bench=[{"rows": 16384, "hidden": 14336}],
)

FEED_FORWARD = FusionSpec(
    name="feed_forward",
    fused=feed_forward,
    reference=feed_forward_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("*batch k"),
        "gate_weight": tensor("n k"),
        "up_weight": tensor("n k"),
        "down_weight": tensor("out n"),
        "activation": ACTIVATION,
    },
    grad=True,
    max_launches=2,
    bench=[{"batch": (8192,), "k": 4096, "n": 14336, "out": 4096, "activation": "silu"}],
)

SPECS = [SPEC, PACKED, FEED_FORWARD]
