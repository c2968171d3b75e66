"""The mask that a reference is handed where it is measured: one that keeps all, in place of the kernel's own draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pytest_fusion.case.containers import tensors_of
from pytest_fusion.spec.fusion_spec import FusionSpec


def full_mask(spec: FusionSpec, sizes: Mapping[str, Any], result: Any) -> dict[str, torch.Tensor]:
    """By the name of the reference's parameter, a bool on the result's device; empty for a spec without masks.

    Of the shape in ``rng(dims=...)``, else of the largest floating output, as most masks are. What is kept makes no
    difference to launches and bytes.
    """
    rng = spec.random
    outputs = [t for t in tensors_of(result) if t.is_floating_point()]
    if rng is None or rng.mask is None or not outputs:
        return {}
    largest = max(outputs, key=torch.Tensor.numel)
    shape = largest.shape if rng.dims is None else torch.Size(rng.dims.evaluate(sizes))
    return {rng.mask: torch.ones(shape, dtype=torch.bool, device=largest.device)}
