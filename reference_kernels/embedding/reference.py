"""The unfused reference of embedding. Each computes in ``compute`` and rounds once, at the end."""

from __future__ import annotations

import torch


def embedding_bag_reference(
    weight: torch.Tensor,
    starts: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    sample_weights: torch.Tensor | None = None,
    mode: str = "sum",
    checked: bool = True,  # noqa: ARG001 -- indices are right here
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Sums or means of rows of several tables, ``(batch, tables, features)`` in the dtype of ``weight``.

    ``weight`` is ``(rows, features)``, all tables one below the other; table ``t`` has the rows from ``starts[t]`` to
    ``starts[t + 1] - 1``. ``offsets``, ``(tables * batch + 1,)``, cuts the flat ``indices`` into bags, all of the first
    table's first; an index counts from the start of its table. A row is multiplied by its ``sample_weights``, of the
    shape of ``indices``; a mean divides by the number of samples in the bag. A bag without samples gives 0.
    """
    lengths = offsets.diff().long()
    tables = len(starts) - 1
    batch = len(lengths) // tables
    bag = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    rows = weight[starts[bag // max(batch, 1)] + indices].to(compute)
    if sample_weights is not None:
        rows = rows * sample_weights.to(compute)[:, None]
    out = torch.zeros((len(lengths), weight.shape[1]), dtype=compute, device=weight.device).index_add(0, bag, rows)
    if mode == "mean":
        out = out / lengths.clamp(min=1)[:, None]
    return out.view(tables, batch, -1).transpose(0, 1).to(weight.dtype).contiguous()


def dot_interaction_reference(
    dense: torch.Tensor, sparse: torch.Tensor, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """``dense`` followed by the products of all pairs of vectors of a sample, ``(batch, features + pairs)``.

    ``dense`` is ``(batch, features)``, ``sparse`` ``(batch, tables, features)`` of its dtype. The vectors of a sample
    are ``dense``'s row and ``sparse``'s, in this order; pairs come in the order of ``torch.tril_indices(n, n, -1)``.
    """
    vectors = torch.cat((dense[:, None], sparse), 1).to(compute)
    first, second = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1, device=dense.device)
    products = (vectors @ vectors.transpose(1, 2))[:, first, second]
    return torch.cat((dense.to(compute), products), 1).to(dense.dtype)
