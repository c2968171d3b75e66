"""The specs of cross_entropy: any rank and layout, every option, labels that are ignored, with the gradient."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, derived, dim, tensor, values
from reference_kernels.cross_entropy.kernel import cross_entropy
from reference_kernels.cross_entropy.reference import cross_entropy_reference


def _labels(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Any class in four rows of five, -100 in the fifth."""
    shape, device = logits.shape[:-1], logits.device
    label = torch.randint(logits.shape[-1], shape, generator=generator, device=device)
    return label.masked_fill(torch.rand(shape, generator=generator, device=device) < 0.2, -100)


OPTIONS = {
    "label_smoothing": st.sampled_from((0.0, 0.1)),
    "z_loss": st.sampled_from((0.0, 0.01)),
    "softcap": st.sampled_from((None, 3.0)),
}
PLAIN = {"label_smoothing": 0.0, "z_loss": 0.0, "softcap": None}

SPEC = FusionSpec(
    name="cross_entropy",
    fused=cross_entropy,
    reference=cross_entropy_reference,
    malformed=True,
    strict=True,
    inputs={
        "logits": tensor("*batch vocab"),
        "target": derived(_labels),
        **OPTIONS,
        "reduction": st.sampled_from(("mean", "sum")),
    },
    dims={"vocab": dim(1)},
    grad="logits",
    max_launches=2,
    bench=[{"batch": (8192,), "vocab": vocab, **PLAIN, "reduction": "mean"} for vocab in (131072, 128256)],
)

# An ignored class is as good as any: labels then come in every layout too.
ROWS = FusionSpec(
    name="cross_entropy_rows",
    fused=cross_entropy,
    reference=cross_entropy_reference,
    malformed=True,
    strict=True,
    inputs={
        "logits": tensor("rows vocab"),
        "target": tensor("rows", dtype=torch.int64, values=values.indices("vocab")),
        "ignore_index": st.sampled_from((-100, 0, 2)),
        **OPTIONS,
        "reduction": "none",
    },
    dims={"vocab": dim(1)},
    grad="logits",
    invariant="rows",
    max_launches=1,
    bench=[{"rows": 8192, "vocab": 131072, "ignore_index": -100, **PLAIN}],
)

# Interpreted tiles hold 128 columns, so the specs above loop there; on a GPU only rows past 8192 do.
LONG = FusionSpec(
    name="cross_entropy_long",
    fused=cross_entropy,
    reference=cross_entropy_reference,
    malformed=True,
    strict=True,
    inputs={"logits": tensor("rows vocab"), "target": derived(_labels), **OPTIONS, "reduction": "none"},
    dims={"rows": dim(0, 8), "vocab": dim(8193, 40000)},
    grad="logits",
    max_launches=1,
    requires="cuda",
)

SPECS = [SPEC, ROWS, LONG]
