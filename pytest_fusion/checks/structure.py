"""Check `structure`: nesting, shape, dtype, device, plain values, and wrongly shared memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from pytest_fusion.case.containers import has_no_equality
from pytest_fusion.case.strided import expanded
from pytest_fusion.checks.context import Outputs
from pytest_fusion.checks.verdict import Verdict, failed, passed

# Above this size interleaved views are compared by extents, not exactly.
_EXACT_OVERLAP_ELEMENTS = 1 << 20


def _extent(t: torch.Tensor) -> tuple[int, int]:
    """First and one-past-last byte address of the elements."""
    if t.numel() == 0:
        return 0, 0
    last = sum(stride * (size - 1) for size, stride in zip(t.shape, t.stride(), strict=True))
    start = t.data_ptr()
    return start, start + (last + 1) * t.element_size()


def _addresses(t: torch.Tensor) -> torch.Tensor:
    grid = torch.zeros((), dtype=torch.int64)
    for axis, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        step = torch.arange(size, dtype=torch.int64) * stride * t.element_size()
        grid = grid + step.reshape(-1, *[1] * (t.dim() - axis - 1))
    return (grid + t.data_ptr()).reshape(-1)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share memory of an element; interleaved views that do not touch share none."""
    if a.device != b.device or a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    (a0, a1), (b0, b1) = _extent(a), _extent(b)
    if a0 == a1 or b0 == b1 or a1 <= b0 or b1 <= a0:
        return False
    if max(a.numel(), b.numel()) > _EXACT_OVERLAP_ELEMENTS:
        return True
    return bool(torch.isin(_addresses(a), _addresses(b)).any())


def _in_one_element(x: str, y: str, pairs: Collection[tuple[str, str]], inputs: Mapping[str, torch.Tensor]) -> bool:
    """Whether two outputs are views of an input whose elements share memory, where separate views may meet."""
    # Strides of 0 are the only layout with that.
    around = [t for name, t in inputs.items() if (x, name) in pairs and (y, name) in pairs]
    return any(expanded(t.shape, t.stride()) for t in around)


def sharing(outputs: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> set[tuple[str, str]]:
    """Pairs of an output and an input, or two outputs, that share memory, except by an input's own layout."""
    pairs = {(o, i) for o, a in outputs.items() for i, b in inputs.items() if overlap(a, b)}
    for (x, a), (y, b) in itertools.combinations(outputs.items(), 2):
        if overlap(a, b) and not _in_one_element(x, y, pairs, inputs):
            pairs.add((x, y))
    return pairs


def check_structure(
    fused: Outputs, reference: Outputs, *, shared: Collection[tuple[str, str]] = (), precision: float = 1e-5
) -> Verdict:
    """Compare the returned structures, apart from tensor elements.

    ``shared``: names with shared memory, unlike the reference's; ``precision``: relative error allowed for a Python
    float.
    """

    def wrong(reason: str, slug: str, **more: Any) -> Verdict:
        return failed("structure", reason, identity=f"structure:{slug}", **more)

    if fused.shape != reference.shape:
        advice = ": does the test return what its kernel returned?" if fused.shape == "None" else ""
        reason = f"the fused kernel returned {fused.shape}, the reference {reference.shape}{advice}"
        return wrong(reason, "nesting", fused=fused.shape, reference=reference.shape)
    for name, expected in reference.tensors.items():
        got = fused.tensors[name]
        posing = _posing(got, expected)
        if posing is not None:
            reason = f"{name} is {posing}; return a plain tensor that holds the answer"
            return wrong(
                reason, f"{name}:type", output=name, fused=type(got).__name__, reference=type(expected).__name__
            )
        for what, found, allowed in (
            ("shape", tuple(got.shape), tuple(expected.shape)),
            ("dtype", got.dtype, expected.dtype),
            ("device", got.device, expected.device),
        ):
            if found != allowed:
                reason = f"{name} has {what} {found}, the reference's has {allowed}"
                return wrong(reason, f"{name}:{what}", output=name, fused=str(found), reference=str(allowed))
    for name, expected in reference.plain.items():
        number = fused.plain.get(name)
        if type(number) is not type(expected) or not _same_plain(number, expected, precision):
            return wrong(f"{name} is {number!r}, the reference's is {expected!r}", f"{name}:value", output=name)
    for x, y in sorted(shared):
        reason = f"{x} shares memory with {y}, which the reference's does not; writing to one changes the other"
        return wrong(reason, "aliasing", output=x, other=y)
    return passed("structure")


def _posing(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """What makes a tensor special: a subclass or own methods can change what comparisons see."""
    # A subclass that the reference returns too (quantised tensors) and a parameter are allowed.
    if type(got) not in (torch.Tensor, torch.nn.Parameter, type(expected)):
        return f"a {type(got).__name__}, the reference's is a {type(expected).__name__}"
    hidden = sorted(name for name in vars(got) if hasattr(torch.Tensor, name)) if hasattr(got, "__dict__") else []
    return f"a tensor whose {hidden[0]} is its own" if hidden else None


def _same_plain(got: object, expected: object, precision: float) -> bool:
    if isinstance(got, float) and isinstance(expected, float):
        # The lanes do not follow a Python float, so only the inputs' precision is known.
        return math.isclose(got, expected, rel_tol=precision) or (math.isnan(got) and math.isnan(expected))
    if has_no_equality(got):
        return True  # objects that compare by identity: only their types can be compared
    same = got == expected
    return bool(same.all()) if hasattr(same, "all") else bool(same)
