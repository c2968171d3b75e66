"""The specs of embedding: bags of any length, tables of any size, repeated rows, with gradients."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, derived, dim, optional, tensor, values
from reference_kernels.embedding.interaction import dot_interaction
from reference_kernels.embedding.kernel import embedding_bag
from reference_kernels.embedding.reference import dot_interaction_reference, embedding_bag_reference

INDICES = (torch.int32, torch.int64)
FLOATS = (torch.float32, torch.bfloat16)


def _equal(tables: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    return torch.arange(tables + 1, device=generator.device) * vocab


def _cuts(tables: int, batch: int, samples: int, generator: torch.Generator) -> torch.Tensor:
    """Bags of any length, many of them empty, which take all samples."""
    inner = torch.randint(0, samples + 1, (tables * batch - 1,), generator=generator, device=generator.device)
    ends = inner.new_tensor([0]), inner.sort().values, inner.new_tensor([samples])
    return torch.cat(ends).to(torch.int32)


# Tables of one size, so that indices come in every layout. Bags that share rows, rows that no bag has.
SPEC = FusionSpec(
    name="embedding_bag",
    fused=embedding_bag,
    reference=embedding_bag_reference,
    malformed=True,
    strict=True,
    inputs={
        "weight": tensor("tables*vocab features"),
        "starts": derived(_equal),
        "indices": tensor("samples", dtype=INDICES, values=values.indices("vocab")),
        "offsets": derived(_cuts),
        "sample_weights": optional(tensor("samples", dtype=FLOATS)),
        "mode": st.sampled_from(("sum", "mean")),
        "checked": False,  # on a GPU the check waits for the device
    },
    dims={
        "tables": dim(1, 5),
        "batch": dim(1, 20),
        "vocab": dim(1, 40),
        "samples": dim(0, 130),
        "features": dim(0, 300),
    },
    grad=("weight", "sample_weights"),
    max_launches=1,
    bench=[
        {"tables": 26, "batch": 8192, "vocab": 100_000, "features": 128, "samples": 26 * 8192 * 20}
        | {"sample_weights": None, "mode": "sum"}
    ],
)


def _sizes(tables: int, rest: int, generator: torch.Generator) -> torch.Tensor:
    """Tables of one row and more."""
    inner = torch.randperm(tables + rest - 1, generator=generator, device=generator.device)[: tables - 1] + 1
    return torch.cat((inner.new_tensor([0]), inner.sort().values, inner.new_tensor([tables + rest])))


def _few(starts: torch.Tensor, offsets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Mostly the first and the last row of each table."""
    lengths = offsets.diff().long().view(len(starts) - 1, -1).sum(1)
    last = torch.repeat_interleave(starts.diff() - 1, lengths)
    choice = torch.rand(last.shape, generator=generator, device=generator.device)
    return torch.where(choice < 0.4, 0, torch.where(choice < 0.8, last, (choice * last).long()))


UNEQUAL = FusionSpec(
    name="embedding_bag_unequal",
    fused=embedding_bag,
    reference=embedding_bag_reference,
    malformed=True,
    strict=True,
    inputs={
        **SPEC.inputs,
        "weight": tensor("tables+rest features"),
        "starts": derived(_sizes),
        "indices": derived(_few),
        "sample_weights": tensor("samples"),
    },
    dims={**{name: SPEC.dims[name] for name in ("tables", "batch", "samples", "features")}, "rest": dim(0, 60)},
    grad="weight",
    max_launches=1,
)

INTERACTION = FusionSpec(
    name="dot_interaction",
    fused=dot_interaction,
    reference=dot_interaction_reference,
    malformed=True,
    strict=True,
    inputs={"dense": tensor("batch features"), "sparse": tensor("batch tables features")},
    dims={"tables": dim(0, 26), "features": dim(0, 300)},
    grad=True,
    invariant="batch",
    max_launches=1,
    bench=[{"batch": 16384, "tables": 26, "features": 128}],
)

SPECS = [SPEC, UNEQUAL, INTERACTION]
