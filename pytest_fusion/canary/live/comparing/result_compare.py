"""Two results of one call, compared on their device: a handful of sums, and nobody waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_fusion.case.containers import Leaf, leaves, nesting
from pytest_fusion.spec.promises import Tolerance

# Relative to the element and to the root mean square of the output: some four roundings of the dtype, and for float32
# what sums in another order come to. Coarse on purpose: no kernel is sent back for rounding differently.
_ALLOWED = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2.0**-8,
    torch.bfloat16: 2.0**-5,
    torch.float8_e4m3fn: 2.0**-2,
    torch.float8_e5m2: 2.0**-1,
}
# Elements compared at a time: what bounds the memory of the comparison, some 40 bytes for each.
_CHUNK = 1 << 20
FIELDS = ("beyond", "nonfinite", "worst", "squared_difference", "squared_incumbent", "elements")


@dataclass(slots=True)
class Compared:
    """``sums`` (float64, one row of ``FIELDS`` for each output on a device) on the devices of the outputs."""

    sums: list[Tensor]
    reason: str = ""


def structure(value: object) -> str:
    """What a result is without its values: nesting, shapes, dtypes, devices. Equal texts are equal structures."""
    parts = [
        f"{tuple(leaf.value.shape)} {leaf.value.dtype} {leaf.value.device}" if leaf.is_tensor else ""
        for leaf in leaves(value)
    ]
    return f"{nesting(value)} {parts}"


def form(value: object) -> object:
    """As :func:`structure`, hashed sooner: it is asked of every routed call."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    return structure(value)


def compare(incumbent: object, candidate: object, tolerance: Tolerance | None) -> Compared:
    """What the candidate's result differs by. ``reason`` says why where their structures or plain values differ."""
    ours, theirs = structure(incumbent), structure(candidate)
    if ours != theirs:
        return Compared([], f"the incumbent returns {ours}, the candidate {theirs}")
    sums = []
    for one, other in zip(leaves(incumbent), leaves(candidate), strict=True):
        if one.is_tensor:
            sums.append(sums_of(one.value.detach(), other.value.detach(), tolerance))
        elif not _same(one, other):
            return Compared([], f"{one.path or 'the result'} is {one.value!r} and {other.value!r} from the candidate")
    return Compared(sums)


def _same(one: Leaf, other: Leaf) -> bool:
    a, b = one.value, other.value
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b) or abs(a - b) <= 1e-4 * abs(a)
    # Objects of other kinds have no equality that means anything here.
    return not isinstance(a, int | str | bool) or bool(a == b)


def exact(one: Tensor, other: Tensor) -> Tensor:
    """As ``compare`` for two tensors that must hold the same bits: () bool, whether they do not."""
    return ~((one == other) | ((one != one) & (other != other))).all()


@torch.no_grad()
def sums_of(incumbent: Tensor, candidate: Tensor, tolerance: Tolerance | None) -> Tensor:
    """(6) float64 on the tensors' device, in the order of ``FIELDS``."""
    if incumbent.is_complex():
        incumbent, candidate = torch.view_as_real(incumbent), torch.view_as_real(candidate)
    device = incumbent.device
    total = torch.zeros(len(FIELDS), dtype=torch.float64, device=device)
    total[-1].fill_(incumbent.numel())
    if not incumbent.numel():
        return total
    floating = incumbent.is_floating_point()
    wide = torch.float32 if floating and incumbent.dtype.itemsize < 4 else torch.float64
    if tolerance is not None:
        rtol, atol = tolerance.rtol, torch.full((), tolerance.atol, dtype=wide, device=device)
    elif floating:
        rtol = _ALLOWED.get(incumbent.dtype, 2.0**-2)
        atol = rtol * _root_mean_square(incumbent, wide)
    else:
        rtol, atol = 0.0, torch.zeros((), dtype=wide, device=device)
    for one, other in _chunks(incumbent, candidate):
        equal = one == other
        a, b = one.to(wide), other.to(wide)
        finite = torch.isfinite(a) & torch.isfinite(b)
        odd = ~finite & ~equal & ~(torch.isnan(a) & torch.isnan(b))
        used = finite & ~equal
        difference = torch.where(used, (a - b).abs(), 0.0)
        allowed = atol + rtol * torch.where(finite, a.abs(), 0.0)
        over = (difference > allowed) | (used & (allowed == 0))
        # Where nothing is allowed, any difference is as bad as a large one.
        ratio = torch.where(used, difference / allowed.clamp_min(1e-300 if wide == torch.float64 else 1e-37), 0.0)
        total[0] += over.sum()
        total[1] += odd.sum()
        total[2] = torch.maximum(total[2], ratio.max().to(torch.float64))
        total[3] += difference.to(torch.float64).square().sum()
        total[4] += torch.where(finite, a, 0.0).to(torch.float64).square().sum()
    return total


def _root_mean_square(values: Tensor, wide: torch.dtype) -> Tensor:
    square = torch.zeros((), dtype=torch.float64, device=values.device)
    count = torch.zeros((), dtype=torch.float64, device=values.device)
    for (part,) in _chunks(values):
        part = part.to(wide)
        finite = torch.isfinite(part)
        square += torch.where(finite, part, 0.0).to(torch.float64).square().sum()
        count += finite.sum()
    return (square / count.clamp_min(1.0)).sqrt().to(wide)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Pieces of at most ``_CHUNK`` elements of tensors of one shape, none of them copied."""
    first = tensors[0]
    if first.numel() <= _CHUNK or not first.dim():
        yield tensors
        return
    axis = max(range(first.dim()), key=first.size)
    step = max(1, first.size(axis) * _CHUNK // first.numel())
    for start in range(0, first.size(axis), step):
        pieces = tuple(tensor.narrow(axis, start, min(step, first.size(axis) - start)) for tensor in tensors)
        yield from _chunks(*pieces)
