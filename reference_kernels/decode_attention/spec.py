"""The specs of decode_attention: sequences of all lengths, chunks, grouped heads, pages in any order, float8."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, derived, dim, tensor, values
from reference_kernels.decode_attention.kernel import decode_attention
from reference_kernels.decode_attention.reference import decode_attention_reference

# Finite: what is not read may be anything, but a weight of 0 times an infinity is NaN. Of many significant bits, by
# which a product is recognised as one of 16-bit values.
FINITE = values.one_of(values.normal(), values.normal(std=30.0), values.normal(mean=100.0), values.constant(0.0))
WINDOW = st.sampled_from((None, 1, 9, 40))
INDICES = (torch.int32, torch.int64)
SCALE = st.sampled_from((None, 0.3))
# Interpreted chunks hold 32 keys, and programs 16 query heads.
DIMS = {"batch": dim(0, 4), "kv_heads": dim(0, 2), "group": dim(0, 18), "features": dim(16, 80)}


SPEC = FusionSpec(
    name="decode_attention",
    fused=decode_attention,
    reference=decode_attention_reference,
    malformed=True,
    strict=True,
    inputs={
        "q": tensor("batch kv_heads*group features", values=FINITE),
        "k_cache": tensor("batch capacity kv_heads features", values=FINITE),
        "v_cache": tensor("batch capacity kv_heads features", values=FINITE),
        "lengths": tensor("batch", dtype=INDICES, values=values.integers(0, "capacity")),
        "window": WINDOW,
        "scale": SCALE,
        "checked": False,  # on a GPU the check waits for the device
    },
    dims={**DIMS, "capacity": dim(0, 130)},
    invariant="batch",
    max_launches=2,
)


PAGED = FusionSpec(
    name="decode_attention_paged",
    fused=decode_attention,
    reference=decode_attention_reference,
    malformed=True,
    strict=True,
    inputs={
        "q": tensor("batch kv_heads*group features", values=FINITE),
        "k_cache": tensor("pages page_size kv_heads features", values=FINITE),
        "v_cache": tensor("pages page_size kv_heads features", values=FINITE),
        "lengths": tensor("batch", dtype=INDICES, values=values.integers(0, "most*page_size")),
        "page_table": tensor("batch most", dtype=INDICES, values=values.indices("pages")),
        "window": WINDOW,
        "scale": SCALE,
        "checked": False,
    },
    dims={**DIMS, "pages": dim(1, 9), "page_size": dim(1, 17), "most": dim(0, 5)},
    invariant="batch",
    max_launches=2,
)


def _lengths(generator: torch.Generator, batch: int, most: int, pages: int, page_size: int) -> torch.Tensor:
    """Any from 0 to what the table has room for; the first sequence fills it."""
    capacity = most * page_size if pages else 0
    found = torch.randint(0, capacity + 1, (batch,), generator=generator, device=generator.device)
    found[:1] = capacity
    return found.to(torch.int32)


def _table(generator: torch.Generator, lengths: torch.Tensor, most: int, pages: int, page_size: int) -> torch.Tensor:
    """Pages in any order, some shared; beyond a sequence's end, numbers of no page."""
    shape = (len(lengths), most)
    found = torch.randint(0, max(pages, 1), shape, generator=generator, device=generator.device)
    used = torch.arange(most, device=generator.device) * page_size < lengths[:, None]
    return torch.where(used, found, -7).to(torch.int32)


FLOAT8 = FusionSpec(
    name="decode_attention_float8",
    fused=decode_attention,
    reference=decode_attention_reference,
    malformed=True,
    strict=True,
    inputs={
        "q": tensor("batch kv_heads*group features", values=values.normal()),
        "k_cache": tensor("pages page_size kv_heads features", dtype=torch.float8_e4m3fn, values=values.normal()),
        "v_cache": tensor("pages page_size kv_heads features", dtype=torch.float8_e4m3fn, values=values.normal()),
        "lengths": derived(_lengths),
        "page_table": derived(_table),
        "k_scale": tensor("kv_heads", dtype=torch.float32, values=values.positive(0.1, 2.0)),
        "v_scale": tensor("kv_heads", dtype=torch.float32, values=values.positive(0.1, 2.0)),
        "window": WINDOW,
        "checked": False,
    },
    dims={**PAGED.dims, "pages": dim(0, 9)},
    max_launches=2,
)


def _full(batch: int, capacity: int, generator: torch.Generator) -> torch.Tensor:
    return torch.full((batch,), capacity, dtype=torch.int32, device=generator.device)


def _full_paged(batch: int, most: int, page_size: int, generator: torch.Generator) -> torch.Tensor:
    return _full(batch, most * page_size, generator)


def _shuffled(generator: torch.Generator, batch: int, most: int, pages: int) -> torch.Tensor:
    """Every page once, as far as there are enough, in any order."""
    order = torch.randperm(batch * most, generator=generator, device=generator.device)
    return (order % pages).view(batch, most).to(torch.int32)


# Full caches of any size, and those that are measured: on a GPU a chunk holds 512 keys and more.
FULL = SPEC.with_(
    name="decode_attention_full",
    inputs={**SPEC.inputs, "lengths": derived(_full)},
    dims={"features": dim(16, 256)},
    invariant=(),
    requires="cuda",
    bench=[
        {"batch": batch, "kv_heads": 8, "group": 8, "features": 128, "capacity": capacity}
        | {"window": None, "scale": None}
        for batch, capacity in ((64, 8192), (1, 131072))
    ],
)

FULL_PAGED = PAGED.with_(
    name="decode_attention_full_paged",
    inputs={**PAGED.inputs, "lengths": derived(_full_paged), "page_table": derived(_shuffled)},
    dims={"features": dim(16, 256), "pages": dim(1), "page_size": dim(1), "most": dim()},
    invariant=(),
    requires="cuda",
    bench=[
        {"batch": 64, "kv_heads": 8, "group": 8, "features": 128, "pages": 32768, "page_size": 16, "most": 512}
        | {"window": None, "scale": None}
    ],
)

SPECS = [SPEC, PAGED, FLOAT8, FULL, FULL_PAGED]
