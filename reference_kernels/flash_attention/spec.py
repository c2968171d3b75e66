"""The specs of flash_attention: grouped heads, fewer and more queries than keys, masks, packing, gradients."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, derived, dim, tensor, values
from reference_kernels.flash_attention.kernel import flash_attention
from reference_kernels.flash_attention.reference import flash_attention_reference

# Finite, since a weight of 0 times an infinity is NaN in the reference and in a tile that the mask cuts, and nothing in
# a tile that it leaves out. Of many significant bits, by which a product is recognised as one of 16-bit values.
FINITE = values.one_of(
    values.normal(), values.normal(std=0.01), values.normal(std=30.0), values.normal(mean=100.0), values.constant(0.0)
)
WINDOW = st.sampled_from((None, 1, 7, 20))
SCALE = st.sampled_from((None, 0.3))
# Interpreted tiles hold 32 queries and 16 keys forward, so these sizes take several of each.
HEADS = {"kv_heads": dim(0, 2), "group": dim(0, 3), "features": dim(16, 80)}

SPEC = FusionSpec(
    name="flash_attention",
    fused=flash_attention,
    reference=flash_attention_reference,
    malformed=True,
    strict=True,
    inputs={
        "q": tensor("batch queries kv_heads*group features", values=FINITE),
        "k": tensor("batch keys kv_heads features", values=FINITE),
        "v": tensor("batch keys kv_heads features", values=FINITE),
        "causal": st.booleans(),
        "window": WINDOW,
        "scale": SCALE,
    },
    dims={"batch": dim(0, 3), "queries": dim(0, 50), "keys": dim(0, 50), **HEADS},
    grad=True,
    invariant="batch",
    max_launches=1,
)


def _offsets(generator: torch.Generator, queries: int) -> torch.Tensor:
    """Three sequences of any lengths, zero among them."""
    return _cut(generator, queries)


def _k_offsets(generator: torch.Generator, keys: int) -> torch.Tensor:
    return _cut(generator, keys)


def _cut(generator: torch.Generator, rows: int) -> torch.Tensor:
    cuts = torch.randint(0, rows + 1, (2,), generator=generator, device=generator.device)
    return torch.cat([cuts.new_tensor([0]), cuts.sort().values, cuts.new_tensor([rows])]).to(torch.int32)


PACKED = FusionSpec(
    name="flash_attention_packed",
    fused=flash_attention,
    reference=flash_attention_reference,
    malformed=True,
    strict=True,
    inputs={
        "q": tensor("queries kv_heads*group features", values=FINITE),
        "k": tensor("keys kv_heads features", values=FINITE),
        "v": tensor("keys kv_heads features", values=FINITE),
        "causal": st.booleans(),
        "window": WINDOW,
        "scale": SCALE,
        "offsets": derived(_offsets),
        "k_offsets": derived(_k_offsets),
        "checked": False,  # on a GPU the check waits for the device
    },
    dims={"queries": dim(0, 50), "keys": dim(0, 50), **HEADS},
    grad=True,
    max_launches=1,
)

# Few cases of any size, heads up to the widest, and those that are measured; on a GPU a tile holds up to 128 of each.
FULL = SPEC.with_(
    name="flash_attention_full",
    dims={"features": dim(16, 256)},
    requires="cuda",
    bench=[
        {"batch": batch, "queries": length, "keys": length, "kv_heads": 8, "group": 4, "features": 128}
        | {"causal": True, "window": window, "scale": None}
        for batch, length, window in ((4, 8192, None), (4, 4096, None), (1, 16384, 1024))
    ],
)

SPECS = [SPEC, PACKED, FULL]
