"""Recommendation: bags of embeddings from many tables, and DLRM's dot interaction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from benchmarks.suite.families.made import normal
from benchmarks.suite.model import Bar, Problem, Row, Work, bars, moved, over
from reference_kernels.embedding import dot_interaction, embedding_bag


def bags(device: torch.device, tables: int, batch: int, length: int, vocab: int, features: int) -> Problem:
    """Bags of one length. Torch has a call, and a tensor, for each table."""
    weight = normal(device, tables * vocab, features)
    samples = batch * length
    starts = torch.arange(tables + 1, device=device) * vocab
    indices = torch.randint(vocab, (tables * samples,), device=device)
    offsets = torch.arange(tables * batch + 1, device=device) * length

    def eager(
        weight: torch.Tensor,  # noqa: ARG001
        starts: torch.Tensor,  # noqa: ARG001
        indices: torch.Tensor,
        offsets: torch.Tensor,
        apart: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        found = [
            F.embedding_bag(
                indices[table * samples : (table + 1) * samples],
                own,
                offsets[: batch + 1],
                mode="sum",
                include_last_offset=True,
            )
            for table, own in enumerate(apart)
        ]
        return torch.stack(found, 1)

    read = tables * samples * features * weight.element_size()
    return Problem(
        {
            "weight": weight,
            "starts": starts,
            "indices": indices,
            "offsets": offsets,
            "apart": list(torch.split(weight, vocab)),
        },
        lambda weight, starts, indices, offsets, apart: embedding_bag(weight, starts, indices, offsets, checked=False),
        eager,
        Work(read + moved(indices, offsets) + tables * batch * features * weight.element_size()),
        compiles=None,
    )


def _dotted(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """As DLRM has it: join, multiply all with all, pick the lower triangle, join."""
    vectors = torch.cat((dense.unsqueeze(1), sparse), 1)
    count = vectors.shape[1]
    first, second = torch.tril_indices(count, count, -1, device=dense.device)
    return torch.cat((dense, torch.bmm(vectors, vectors.transpose(1, 2))[:, first, second]), 1)


def interaction(device: torch.device, batch: int, tables: int, features: int) -> Problem:
    dense, sparse = normal(device, batch, features), normal(device, batch, tables, features)
    pairs = (tables + 1) * tables // 2
    result = batch * (features + pairs) * dense.element_size()
    return Problem(
        {"dense": dense, "sparse": sparse},
        dot_interaction,
        _dotted,
        Work(moved(dense, sparse) + result),
        backward=Work(2 * moved(dense, sparse) + result),
        grads=("dense", "sparse"),
    )


ROWS = [
    Row(
        "embedding",
        "26 bags of 20, batch 8192, 26x100000x128",
        bags,
        {"tables": 26, "batch": 8192, "length": 20, "vocab": 100_000, "features": 128},
        {"tables": 3, "batch": 5, "length": 4, "vocab": 30, "features": 32},
        bars(Bar("copy", 0.65), over(eager=1.5), Bar("copy", 0.80, goal=True)),
    ),
    Row(
        "embedding",
        "dot interaction, 16384x27x128",
        interaction,
        {"batch": 16384, "tables": 26, "features": 128},
        {"batch": 5, "tables": 4, "features": 32},
        bars(Bar("copy", 0.55), over(eager=3.0, compile=1.5), Bar("copy", 0.75, goal=True)),
        backward=True,
    ),
]
