"""The results of a call as named outputs: returned ones, and inputs written in place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pytest_fusion.case.containers import leaves, nesting, tensors_by_name

# The end of the name of an output that is an input.
IN_PLACE = " (in place)"


@dataclass(slots=True)
class Outputs:
    """Named result tensors and plain values; ``shape`` is the nesting as text."""

    tensors: dict[str, torch.Tensor]
    plain: dict[str, Any]
    shape: str


def collect(result: Any, arguments: Mapping[str, Any], mutates: Iterable[str], *, returned: bool = True) -> Outputs:
    """Name every leaf. The lone result is called ``out``; an input written in place keeps its name (``ps[0]``)."""
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    if returned:
        for leaf in leaves(result):
            name = f"out{leaf.path}"
            if leaf.is_tensor:
                tensors[name] = leaf.value
            else:
                plain[name] = leaf.value
    for name in mutates:
        tensors |= {f"{inner}{IN_PLACE}": t for inner, t in tensors_by_name(name, arguments[name]).items()}
    return Outputs(tensors, plain, nesting(result) if returned else "")


def spellings(output: str) -> tuple[str, ...]:
    """Names that ``deterministic=`` may use for an output: ``out[1]``, ``out['dq']``, ``dq``, or an input's name."""
    if output.endswith(IN_PLACE):
        inner = output.removesuffix(IN_PLACE)
        return (output, inner, inner.partition("[")[0])
    last = re.search(r"(?:\.|\[')(\w+)(?:'\])?$", output)
    return (output, last[1] if last else output)


def varies(declared: bool | Mapping[str, bool], output: str) -> bool:
    """Whether ``deterministic=`` lets this output, or gradient, vary."""
    if isinstance(declared, bool):
        return not declared
    return not next((declared[name] for name in spellings(output) if name in declared), True)
