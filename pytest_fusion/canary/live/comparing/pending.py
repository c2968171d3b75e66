"""`Comparisons`: compares two results of one call on their device; finished comparisons become observations."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.canary.evidence.evidence_counts import Arm
from pytest_fusion.canary.evidence.observation import Observation
from pytest_fusion.canary.live.calls.captures import Readback
from pytest_fusion.canary.live.calls.copies import Copies
from pytest_fusion.case.containers import Leaf, leaves, nesting
from pytest_fusion.spec.promises import Tolerance

# Relative to the element and to the root mean square of the output: some four roundings of the dtype, and for float32
# what another order of summation makes. Coarse on purpose: rounding differently must not roll a kernel back.
_ALLOWED = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2.0**-8,
    torch.bfloat16: 2.0**-5,
    torch.float8_e4m3fn: 2.0**-2,
    torch.float8_e5m2: 2.0**-1,
}
# Elements compared at a time, which bounds the memory of a comparison to some 40 bytes each.
_CHUNK = 1 << 20
FIELDS = ("beyond", "nonfinite", "worst", "elements")
# The shapes of these results depend on values and cannot be predicted.
VARYING = object()
_MOST_SIGNATURES = 4096


def structure(value: object) -> str:
    """A result's nesting, shapes, dtypes and devices as text; equal texts are equal structures."""
    parts = [
        f"{tuple(leaf.value.shape)} {leaf.value.dtype} {leaf.value.device}" if leaf.is_tensor else ""
        for leaf in leaves(value)
    ]
    return f"{nesting(value)} {parts}"


def form(value: object) -> object:
    """The same as :func:`structure`, but faster for one tensor: every routed call needs it."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    return structure(value)


class Forms:
    """The `form` of results by the signature of calls, ``VARYING`` where there were several; bounded."""

    def __init__(self) -> None:
        self._known: dict[object, object] = {}

    @property
    def full(self) -> bool:
        """Whether the bound is reached, so that no further signature is learned."""
        return len(self._known) >= _MOST_SIGNATURES

    def get(self, signature: object) -> object | None:
        """The form of results of calls with this signature; ``None`` for a new one."""
        return self._known.get(signature)

    def learn(self, signature: object, found: object) -> None:
        known = self._known.get(signature)
        if known is None:
            if not self.full:
                self._known[signature] = found
        elif known != found:
            self._known[signature] = VARYING


def compare(incumbent: object, candidate: object, tolerance: Tolerance | None) -> list[Tensor] | str:
    """A row of `sums_of` for each output; the reason for none where structures or plain values differ."""
    ours, theirs = structure(incumbent), structure(candidate)
    if ours != theirs:
        return f"the incumbent returns {ours}, the candidate {theirs}"
    sums = []
    for one, other in zip(leaves(incumbent), leaves(candidate), strict=True):
        if one.is_tensor:
            sums.append(sums_of(one.value.detach(), other.value.detach(), tolerance))
        elif not _same(one, other):
            return f"{one.path or 'the result'} is {one.value!r} and {other.value!r} from the candidate"
    return sums


def _same(one: Leaf, other: Leaf) -> bool:
    a, b = one.value, other.value
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b) or abs(a - b) <= 1e-4 * abs(a)
    # Equality of other objects means nothing here.
    return not isinstance(a, int | str | bool) or bool(a == b)


def exactly(one: Tensor, other: Tensor) -> Tensor:
    """A row of ``FIELDS`` for two tensors that must be equal: ``beyond`` is 1 if they differ."""
    row = torch.zeros(len(FIELDS), dtype=torch.float64, device=one.device)
    row[0] += ~((one == other) | ((one != one) & (other != other))).all()
    return row


@torch.no_grad()
def sums_of(incumbent: Tensor, candidate: Tensor, tolerance: Tolerance | None) -> Tensor:
    """The differences of two tensors as a float64 row of ``FIELDS``, on their device."""
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
        # With no difference allowed, any is as bad as a large one.
        ratio = torch.where(used, difference / allowed.clamp_min(1e-300 if wide == torch.float64 else 1e-37), 0.0)
        total[0] += over.sum()
        total[1] += odd.sum()
        total[2] = torch.maximum(total[2], ratio.max().to(torch.float64))
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


# With so many comparisons unfinished, the device gets no further ones.
MOST_WAITING = 256


@dataclass(slots=True)
class _Waiting:
    bucket: str
    arm: Arm
    since: float
    labels: list[str]
    held: list[bool]
    rows: Readback
    call: Any


class Comparisons:
    """A bounded queue of comparisons. ``submit`` waits for no device; ``ready`` is for one thread."""

    def __init__(
        self, tolerance: Tolerance | None, writes: Collection[str] | None, scratch: Collection[str], timeout_s: float
    ) -> None:
        self._tolerance = tolerance
        self._writes = writes
        self._scratch = frozenset(scratch)
        self._timeout_s = timeout_s
        self.clear()

    def clear(self) -> None:
        """Empties the queue, as in a forked child."""
        self._waiting: deque[_Waiting] = deque()
        self._reading = threading.Lock()

    @property
    def full(self) -> bool:
        return len(self._waiting) >= MOST_WAITING

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(
        self,
        incumbent: object,
        candidate: object,
        copies: Copies,
        bucket: str,
        *,
        copied: str,
        arm: Arm = "candidate",
        call: Any = None,
    ) -> Observation | None:
        """Compares two results and the arguments afterwards; an observation where no device is needed. ``copied`` names
        the kernel that ran on the copies; in arm ``"itself"`` the incumbent ran there in the candidate's place."""
        rows = compare(incumbent, candidate, self._tolerance)
        if isinstance(rows, str):
            return Observation("structure", bucket, rows, arm=arm, call=call)
        labels, held = ["the result"] * len(rows), [False] * len(rows)
        for pair in copies.pairs:
            if pair.name in self._scratch:
                continue
            one, other = (pair.original, pair.copy) if copied == "candidate" else (pair.copy, pair.original)
            undeclared = self._writes is not None and pair.name not in self._writes
            labels.append(f"argument {pair.name!r}")
            held.append(undeclared)
            rows.append(exactly(one, other) if undeclared else sums_of(one, other, self._tolerance))
        self._waiting.append(_Waiting(bucket, arm, time.monotonic(), labels, held, Readback(rows), call))
        return None

    def ready(self) -> list[Observation]:
        """The finished comparisons, oldest first; one that the device did not finish in time is a hang."""
        found: list[Observation] = []
        with self._reading:
            while self._waiting:
                first = self._waiting[0]
                if not first.rows.done:
                    if time.monotonic() - first.since <= self._timeout_s:
                        break
                    self._waiting.clear()
                    reason = f"its device did not finish the call in {self._timeout_s:g} s"
                    found.append(Observation("hang", first.bucket, reason))
                    break
                self._waiting.popleft()
                found.append(replace(_observation(first), arm=first.arm))
        return found


def _observation(done: _Waiting) -> Observation:
    worst_result, reason = "ok", ""
    elements = beyond = 0
    worst = 0.0
    for label, held, host in zip(done.labels, done.held, done.rows.host, strict=True):
        row = dict(zip(FIELDS, host.tolist(), strict=True))
        if held and row["beyond"]:
            reason = f"{label} was changed, and is not among those declared in writes"
            return Observation("inputs", done.bucket, reason, call=done.call)
        if row["nonfinite"]:
            worst_result = "nonfinite"
            reason = f"{label}: {row['nonfinite']:.0f} elements are finite in one kernel's and not in the other's"
        elif row["beyond"] and worst_result == "ok":
            worst_result = "violation"
            reason = (
                f"{label}: {row['beyond']:.0f} of {row['elements']:.0f} elements differ by more than is allowed, "
                f"the worst by {row['worst']:.3g} times that"
            )
        elements += int(row["elements"])
        beyond += int(row["beyond"])
        worst = max(worst, row["worst"])
    return Observation(worst_result, done.bucket, reason, elements, beyond, worst, call=done.call)
