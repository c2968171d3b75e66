"""What a reference moves, told without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion import FusionSpec, rng, tensor
from pytest_fusion.bench.entries import entries
from pytest_fusion.bench.without_gpu import full_mask, measure, of_reference, traffic_of_reference
from pytest_fusion.run.measure.launches.launch_count import Counts, Uncounted
from pytest_fusion.run.measure.traffic import Traffic

LOGICAL = {"x": torch.zeros(8)}


def spec(reference: Callable[..., Any]) -> FusionSpec:
    return FusionSpec(name="f", fused=torch.relu, reference=reference, inputs={"x": tensor("n")})


def test_traffic_is_that_of_one_call_whether_or_not_launches_are_counted() -> None:
    """Two operations that read and write 8 float32 each; a table that the first call makes is no part of it."""
    tables: list[torch.Tensor] = []

    def reference(x: torch.Tensor) -> torch.Tensor:
        if not tables:
            tables.append(torch.arange(1000, device=x.device))
        return x.exp().sin()

    expected = Traffic(128, 2, 0, 8)
    assert traffic_of_reference(spec(reference), LOGICAL, {}) == expected
    tables.clear()
    counts, traffic = of_reference(spec(reference), LOGICAL, {})
    assert isinstance(counts, Counts)
    assert traffic == expected


def test_a_reference_that_needs_values_has_no_traffic() -> None:
    """It is told, and nothing is made of it."""

    def reference(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x

    assert traffic_of_reference(spec(reference), LOGICAL, {}) is None
    counts, traffic = of_reference(spec(reference), LOGICAL, {})
    assert isinstance(counts, Uncounted)
    assert traffic is None


@pytest.mark.parametrize("dims", [None, "n"])
def test_a_reference_is_handed_a_mask_where_its_kernel_draws_one(dims: str | None) -> None:
    """What it launches and moves is known: x and the mask of bools are read, the product is written."""

    def fused(x: torch.Tensor, seed: int) -> torch.Tensor:
        return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))

    def reference(x: torch.Tensor, seed: int, mask: torch.Tensor) -> torch.Tensor:
        return x * mask

    drawing = FusionSpec(
        name="f",
        fused=fused,
        reference=reference,
        inputs={"x": tensor("m n"), "seed": 3},
        rng=rng("seed", mask="mask", dims=dims),
        bench=[{"m": 4, "n": 8, "dtype": torch.float32}],
    )
    (entry,) = entries(drawing)
    figures = measure(drawing, entry, {})
    assert isinstance(figures.reference_counts, Counts)
    read = 4 * 32 + (32 if dims is None else 8)
    assert figures.reference == Traffic(read + 4 * 32, 1, 0, 32)
    assert full_mask(spec(torch.relu), {"n": 8}, torch.ones(8)) == {}
