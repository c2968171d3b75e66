"""What is remembered of where a tensor's values come from: kernels do with some what they would not do with others."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.cancellation import LARGEST, NARROW
from pytest_fusion.oracle.lane_store import Store
from pytest_fusion.oracle.operator_plan import Plan
from pytest_fusion.oracle.rounding import D

CASTS = frozenset({"_to_copy", "to", "copy"})
# What leaves float8 numbers float8 numbers, but for a factor.
SCALINGS = frozenset({"mul", "div", "clone", "neg"})
KEEPING = CASTS | SCALINGS
_HOPPER = (9, 0)


@functools.cache
def adds_coarsely(device: torch.device) -> bool:
    """Whether the device's tensor cores add products of float8 in fewer bits than float32 has."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _HOPPER


def multiplied_coarsely(store: Store, factors: Sequence[Tensor], device: torch.device) -> bool:
    """Whether the factors of a product may go to the tensor cores of ``device`` as float8, where that costs bits."""
    return adds_coarsely(device) and all(map(store.of_eighth, factors))


def source_of(store: Store, given: Sequence[Tensor]) -> torch.dtype | None:
    """The 16-bit dtype that one of these is, or was computed from."""
    return next((dtype for t in given if (dtype := t.dtype if t.dtype in NARROW else store.source(t))), None)


def mark_made(
    store: Store, plan: Plan, args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> None:
    """Mark the fresh ``results`` of an operation on the tensors ``given``."""
    if not results:
        return
    made = results[0]
    if plan.name in CASTS and given and given[0].dtype in NARROW and made.dtype in (torch.float32, D):
        store.mark_widened(made, given[0].dtype)
    if plan.name in CASTS and given and not (given[0].is_floating_point() or given[0].is_complex()):
        store.mark_codes(made)
    if plan.name in LARGEST and len(given) == 1:
        store.mark_largest(made, given[0])
    mark_written(store, source_of(store, given), [made])
    if plan.name in KEEPING and len(results) == 1 and adds_coarsely(made.device):
        factors = [t for t in args if isinstance(t, Tensor)]
        if any(map(store.of_eighth, factors if plan.name in SCALINGS else factors[:1])):
            store.mark_eighth(made)


def mark_written(store: Store, source: torch.dtype | None, written: Sequence[Tensor]) -> None:
    """Mark tensors that were computed from, among others, numbers of the 16-bit dtype ``source``."""
    for target in written:
        if source is not None and target.dtype == torch.float32:
            store.mark_computed(target, source)
