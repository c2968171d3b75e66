"""The tensors that the nodes of an autograd graph have saved for backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

# A deeper graph comes from a kernel composed of torch operations; the rest is torch's own.
_MOST_NODES = 200


def nodes(ends: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Every node behind ``ends``, once, at most 200."""
    waiting = [t.grad_fn for t in ends if t.grad_fn is not None]
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [other for other, _ in node.next_functions if other is not None]


def saved(ends: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that ``autograd.Function``s behind ``ends`` saved, also as attributes of ``ctx``, by names like
    ``Norm: saved_tensors[1]``; not torch's own nodes: other kernels change their bits only if they are one of these or
    an input."""
    found: dict[str, torch.Tensor] = {}
    for count, node in enumerate(nodes(ends)):
        if not isinstance(node, torch.autograd.function.BackwardCFunction):
            continue
        name = type(node).__name__.removesuffix("Backward")
        candidates = [(f"{name}: saved_tensors[{i}]", t) for i, t in enumerate(_saved_by(node))]
        candidates += [(f"{name}: ctx.{key}", value) for key, value in vars(node).items()]
        for label, t in candidates:
            if isinstance(t, torch.Tensor) and t.layout is torch.strided:
                found[label if label not in found else f"{label} of node {count}"] = t
    return found


def _saved_by(node: Any) -> tuple[Any, ...]:
    try:
        return tuple(node.saved_tensors)
    except RuntimeError:  # freed, or changed in place where torch sees it, which backward reports
        return ()
