"""A call as a forward pass, or as both: with gradients by the named inputs, for gradients that come from above."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.suite.model import Call

UPSTREAM = "upstream"


def forward(call: Call) -> Call:
    """``call`` without gradients."""

    def run(**inputs: Any) -> Any:
        with torch.no_grad():
            return call(**inputs)

    return run


def both(call: Call, grads: Sequence[str]) -> Call:
    """``call``, then its gradients by the inputs ``grads``; ``upstream`` comes with the inputs (`upstream_of`)."""

    def run(upstream: list[torch.Tensor], **inputs: Any) -> Any:
        with torch.enable_grad():
            given = {name: inputs[name].detach().requires_grad_() for name in grads}
            result = call(**{**inputs, **given})
            ends = _ends(result)
            return result, torch.autograd.grad(ends, list(given.values()), upstream[: len(ends)], allow_unused=True)

    return run


def upstream_of(call: Call, inputs: dict[str, Any], grads: Sequence[str]) -> list[torch.Tensor]:
    """Random gradients for the differentiable results of ``call``; 1 for a loss, as training has it."""
    with torch.enable_grad():
        given = {name: inputs[name].detach().requires_grad_() for name in grads}
        ends = _ends(call(**{**inputs, **given}))
        return [torch.randn_like(end) if end.ndim else torch.ones_like(end) for end in ends]


def _ends(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
