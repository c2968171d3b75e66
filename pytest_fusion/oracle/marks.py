"""Marks for the origin of a tensor's values, which decides what kernels may do with them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_store import Lanes, Store, weak
from pytest_fusion.oracle.operand import Operand
from pytest_fusion.oracle.ops.rule_registry import Operator
from pytest_fusion.oracle.rounding import NARROW, D

FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_HOPPER = (9, 0)


@functools.cache
def adds_coarsely(device: torch.device) -> bool:
    """Whether the device's tensor cores add products of float8 in fewer bits than float32 has."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _HOPPER


def operand_of(store: Store, known: Operator, native: Tensor, lanes: Lanes, kind: str) -> Operand:
    """What the operator ``known`` reads of a tensor."""
    operand = Operand(native, lanes, lanes.rounded, kind == "F" or native.dtype == torch.float32)
    if known.factors:
        marks = store.marks(native)
        operand.codes, operand.eighth = marks.codes, adds_coarsely(native.device) and _of_eighth(store, native)
        if known.product:
            operand.low, operand.source = native.dtype if native.dtype in NARROW else marks.widened, marks.source
    return operand


def _of_eighth(store: Store, tensor: Tensor) -> bool:
    """Whether a kernel may pass this factor of a product to tensor cores as float8."""
    return tensor.dtype in FLOAT8 or store.marks(tensor).eighth


def source_of(store: Store, given: Sequence[Tensor]) -> torch.dtype | None:
    """The 16-bit dtype that one of these tensors has, or was computed from."""
    return next((dtype for t in given if (dtype := t.dtype if t.dtype in NARROW else store.marks(t).source)), None)


def mark_made(
    store: Store, known: Operator, args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> None:
    """Mark the first of the fresh ``results`` of an operation on the tensors ``given``."""
    if not results or not given:
        return
    made, first = results[0], given[0]
    if known.casts and first.dtype in NARROW and made.dtype in (torch.float32, D):
        store.mark(made, widened=first.dtype)
    if known.casts and not (first.is_floating_point() or first.is_complex()):
        store.mark(made, codes=True)
    if known.largest and len(given) == 1:
        store.mark(made, largest=weak(first))
    mark_written(store, source_of(store, given), [made])
    if (known.casts or known.scales) and len(results) == 1 and adds_coarsely(made.device):
        factors = [t for t in args if isinstance(t, Tensor)]
        if any(_of_eighth(store, t) for t in (factors if known.scales else factors[:1])):
            store.mark(made, eighth=True)


def mark_written(store: Store, source: torch.dtype | None, written: Sequence[Tensor]) -> None:
    """Mark tensors that were computed from, among others, numbers of the 16-bit dtype ``source``."""
    for target in written:
        if source is not None and target.dtype == torch.float32:
            store.mark(target, source=source)
