"""Ways in which a kernel may read an input wrongly: at other indices, or by another dim's strides."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pytest_fusion.checks.invariance.case_slices import selected
from pytest_fusion.diagnosis.experiments import Lab
from pytest_fusion.spec.wording import grouped

Change = Callable[[torch.Tensor], torch.Tensor]
# Up to so many inputs are tried in pairs too, such as keys and values beside queries of their shape.
_MOST_IN_PAIRS = 3


@dataclass(frozen=True, slots=True)
class Reading:
    """Inputs that are read wrongly in one way, its description, and the change of each input that has the same effect.

    ``back`` restores the order of a result that is stored in the same wrong one. ``again``: length of a repeated block.
    """

    names: tuple[str, ...]
    what: str
    change: Change
    back: Change | None = None
    again: int = 0

    def applied(self, logical: Mapping[str, Any]) -> dict[str, Any]:
        return {**logical, **{name: self.change(logical[name]) for name in self.names}}

    def __str__(self) -> str:
        return f"{' and '.join(self.names)} {self.what}"


def readings(lab: Lab, logical: Mapping[str, Any]) -> Iterator[Reading]:
    """All readings, taken in turn from each input and group, so that one of four dims leaves runs for others.

    Inputs of one shape, as a cosine and its sine, share the offsets that a kernel computes for them.
    """
    tensors = {
        name: value
        for name, value in logical.items()
        if isinstance(value, torch.Tensor) and value.dtype is not torch.bool
    }
    alike = grouped((value.shape, name) for name, value in tensors.items())
    groups: list[tuple[str, ...]] = [(name,) for name in tensors]
    for names in alike.values():
        if len(names) > 1:
            groups.append(tuple(names))
        if 2 < len(names) <= _MOST_IN_PAIRS:
            groups += itertools.combinations(names, 2)
    waiting = [of(lab, names, tensors[names[0]]) for names in groups]
    while waiting:
        for each in list(waiting):
            reading = next(each, None)
            if reading is None:
                waiting.remove(each)
            else:
                yield reading


def of(lab: Lab, names: tuple[str, ...], t: torch.Tensor) -> Iterator[Reading]:
    """The readings of inputs with the shape of ``t``."""
    for block, axis in itertools.product(lab.blocks, range(t.dim())):
        if 2 <= block < (size := t.shape[axis]):
            what = f"read in its first {block} along axis {axis}, again and again"
            yield Reading(names, what, _taking(axis, [i % block for i in range(size)]), None, block)
    for what, change, back in _ways(t):
        yield Reading(names, what, change, back)


def _ways(t: torch.Tensor) -> Iterator[tuple[str, Change, Change | None]]:
    for axis, size in enumerate(t.shape):
        if size < 2:
            continue
        span = list(range(size))
        half = (size + 1) // 2
        orders = {
            f"read at the first index of axis {axis} only": [0] * size,
            f"read at the last index of axis {axis} only": [size - 1] * size,
            f"read backwards along axis {axis}": span[::-1],
            f"read one index further along axis {axis}": [*span[1:], 0],
            f"read one index before along axis {axis}": [size - 1, *span[:-1]],
            f"read in pairs instead of halves along axis {axis}": [i // 2 + (i % 2) * half for i in span],
            f"read in halves instead of pairs along axis {axis}": [*span[::2], *span[1::2]],
        }
        for what, order in orders.items():
            if order != span and all(0 <= i < size for i in order):
                yield what, _taking(axis, order), None
                if sorted(order) == span and axis == t.dim() - 1 and t.is_floating_point():
                    back = sorted(span, key=order.__getitem__)
                    yield f"{what}, and stored so", _taking(axis, order), _taking(-1, back)
    if t.dim() >= 2 and min(t.shape[-2:]) > 1:
        rows, columns = t.shape[-2:]
        yield (
            "read column by column",
            lambda v: v.reshape(*v.shape[:-2], columns, rows).mT.contiguous(),
            None,
        )
        if rows == columns:
            yield "transposed", lambda v: v.mT.contiguous(), None


def _taking(axis: int, order: list[int]) -> Change:
    return lambda t: selected(t, axis, order)
