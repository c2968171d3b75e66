"""The slices of a case along one dim, run alone, permuted, beside NaN and in other numbers, and their bits compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.layouts import of_fewer
from pytest_fusion.checks.invariance.batches import NAME, Batches, Spent
from pytest_fusion.checks.invariance.case_slices import Unsliceable, input_axes, resized, selected, tensors
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import GRADIENTS, SliceDifference, Verdict, failed, unknown
from pytest_fusion.interpreter.launch import Launch
from pytest_fusion.run.pristine import perf_counter, process_time
from pytest_fusion.spec.values import ValueProfile

# How often both calls of a difference are repeated before it counts; while shrinking it counted before.
_CONFIRMATIONS, _WHILE_SHRINKING = 2, 1


class OtherCase(Exception):
    """A call of other slices failed by itself; the argument is their number."""


@dataclass(frozen=True, slots=True)
class Called:
    """The results of one call: tensors that may not vary, by name, and its launches."""

    tensors: dict[str, torch.Tensor]
    launches: list[Launch] = field(default_factory=list)


# A call of the case with the inputs of these slices; ``None`` where the kernel refused it. Raises ``OtherCase`` for
# other errors.
Call = Callable[[Trial, Sequence[int]], Called | None]


@dataclass(frozen=True, slots=True)
class _Variant:
    """The slices of one call, by number; with ``nan`` every odd one is NaN."""

    slices: tuple[int, ...]
    nan: bool = False

    @property
    def compared(self) -> list[int]:
        """The positions whose bits are compared."""
        return list(range(0, len(self.slices), 2 if self.nan else 1))


@dataclass(frozen=True, slots=True)
class _Difference:
    """Slice ``slice`` of an output with other bits than in the case's own call."""

    output: str
    slice: int
    first: list[int]
    count: int
    ulp: int | None


class Along:
    """One dim of one case, and its slices in other calls."""

    def __init__(self, trial: Trial, dim: str, so_far: Spent, call: Call, *, gradients: bool = False) -> None:
        self.trial, self.dim, self.case = trial, dim, trial.result.case
        self._so_far, self._make, self._gradients = so_far, call, gradients
        size = self.case.sizes[dim]
        assert isinstance(size, int)
        self.size = size
        self.seen: list[int] = []
        # The reference of comparisons: the call of all slices, as the case has it.
        self._whole, self._base = _Variant(tuple(range(size))), dict[str, torch.Tensor]()
        self._launches: dict[int, list[Launch]] = {}
        self.batches = Batches(trial, dim, so_far)
        others = (self.size + 1, self.size - 1, 2 * self.size)
        other = resized(self.case, dim, next((s for s in others if self.batches.fits(s)), self.size))
        self.input_axes = input_axes(trial.spec, self.case, other, trial.logical, dim)
        # The axis of each output that follows the dim; known after the first call of another size.
        self._axes: dict[str, int] = {}

    def judge(self, calls: int, axes: Mapping[str, int] | None = None) -> Verdict | None:
        """The verdict of up to ``calls`` calls and those that they suggest; ``None`` where every slice kept its bits.

        ``axes``: the axes that follow the dim, if known beforehand.
        """
        self._axes = dict(axes or {})
        base = self._call(self._whole)
        if base is None:
            raise Unsliceable("a repeated call was refused")
        self._base = base
        if not base:
            raise Unsliceable("every output may vary from run to run, as deterministic= allows")
        for variant in self._variants(calls - 1):
            if (verdict := self._differs(variant)) is not None:
                return verdict
        for size in self.batches.learnt(self._launches):
            if (verdict := self._differs(self._repeated(size))) is not None:
                return verdict
        if all(size == self.size for size in self.seen):
            raise Unsliceable("no other size of it was accepted")
        return None

    def followers(self, base: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The axis of each output that follows the dim, by a call of another size. Raises ``Unsliceable``."""
        self._base = dict(base)
        for variant in self._variants(3):
            if len(variant.slices) != self.size and (got := self._call(variant)) is not None:
                return self._following(got, len(variant.slices))
        raise Unsliceable("no other size of it was accepted")

    def _differs(self, variant: _Variant) -> Verdict | None:
        """The verdict of one further call."""
        size = len(variant.slices)
        if not self._axes and size == self.size:
            return None  # the axes are unknown before a call of another size
        if not self.batches.admits(size):
            return None
        got = self._call(variant)
        if got is None:
            return None
        if not self._axes:
            self._axes = self._following(got, size)
        self.seen.append(size)
        found = self._compare(got, variant)
        if found is None:
            return None
        verdict = self._confirmed(got, variant)
        if verdict is None:
            verdict = self._explained(variant, found)
            self._so_far.found = True
            seen = verdict.evidence
            self._so_far.at = size, size
            if isinstance(seen, SliceDifference) and seen.depends_on == "size":
                self._so_far.at = seen.sizes[0], seen.sizes[1]
        return verdict

    def _repeated(self, size: int) -> _Variant:
        return _Variant(tuple(i % self.size for i in range(size)))

    def _variants(self, count: int) -> list[_Variant]:
        """The calls to make; the case alone decides, so that a replay makes the same."""
        alone = [_Variant((self.size - 1,))] if self.batches.fits(1) else []
        same = [_Variant(tuple(reversed(range(self.size))))]
        same += [_Variant(tuple(range(self.size)), nan=True)] if self._may_be_nan() else []
        repeated = [self._repeated(size) for size in self.batches.chosen(max(count - len(alone) - len(same), 1))]
        if not alone and not repeated:
            raise Unsliceable("only one size of it is allowed, so that no output can be seen to follow it")
        # A call of another size comes first, as it shows which axes follow the dim.
        first, rest = (alone, repeated) if alone else (repeated[:1], repeated[1:])
        return [*first, *same, *rest]

    def _call(self, variant: _Variant) -> dict[str, torch.Tensor] | None:
        """The compared tensors of a call of these slices; ``None`` where the kernel refused. Raises ``OtherCase``."""
        clock, size = self.trial.context.clock, len(variant.slices)
        before, begun, used = clock.seconds.get("fused", 0.0), perf_counter(), process_time()
        context = replace(self.trial.context, programs=self.batches.programs)
        trial = self.trial.with_(self._logical(variant), self._lying(size), context)
        try:
            called = self._make(trial, variant.slices)
        except OtherCase:
            if size != self.size:
                raise
            return None
        # Not wall time alone: beside six processes on two cores no call reached a threshold at 300 rows.
        used = process_time() - used
        self._so_far.seconds += min(perf_counter() - begun, used)
        self.batches.took(size, min(clock.seconds.get("fused", 0.0) - before, used))
        if called is None:
            return None
        self._launches[size] = called.launches
        return called.tensors

    def _logical(self, variant: _Variant) -> dict[str, Any]:
        logical = dict(self.trial.logical)
        for name, axis in self.input_axes.items():
            logical[name] = selected(logical[name], axis, variant.slices)
        for name in self._may_be_nan() if variant.nan else ():
            logical[name].transpose(0, self.input_axes[name])[1::2] = torch.nan
        return logical

    def _lying(self, size: int) -> Case:
        """The case, with input layouts as if ``size`` slices were cut from its own inputs."""
        case = self.case
        for name, axis in self.input_axes.items():
            if (own := case.tensors.get(name)) is not None:
                layout = of_fewer(tuple(self.trial.logical[name].shape), own.layout, axis, size)
                case = case.with_tensor(name, layout=layout)
        return case

    def _may_be_nan(self) -> list[str]:
        """The inputs whose slices may be NaN. An expanded one has only slice 0, which stays."""
        return [
            name
            for name, inner in tensors(self.trial.spec)
            if name in self.input_axes
            and (inner.values is None or (isinstance(inner.values, ValueProfile) and inner.values.kind == "default"))
            and (dtype := self.trial.logical[name].dtype).is_floating_point
            and dtype.itemsize > 1
        ]

    def _following(self, got: Mapping[str, torch.Tensor], size: int) -> dict[str, int]:
        """The axis of each output that is as long as the dim in both calls; outputs of one shape do not follow it."""
        axes: dict[str, int] = {}
        for name, t in self._base.items():
            other = got.get(name)
            if other is None or other.dim() != t.dim():
                raise Unsliceable(f"{name} has another number of dimensions when there are {size} of it")
            changed = [axis for axis in range(t.dim()) if t.shape[axis] != other.shape[axis]]
            if not changed:
                continue
            if len(changed) > 1 or (t.shape[changed[0]], other.shape[changed[0]]) != (self.size, size):
                raise Unsliceable(f"the shape of {name} follows it in a way that cannot be cut into slices")
            axes[name] = changed[0]
        if not axes:
            raise Unsliceable("no output follows it")
        return axes

    def _compare(self, got: Mapping[str, torch.Tensor], variant: _Variant) -> _Difference | None:
        """The first slice with other bits than in the case's own call."""
        base, compared = self._base, variant.compared
        for name, axis in self._axes.items():
            shape = [len(variant.slices) if i == axis else s for i, s in enumerate(base[name].shape)]
            if name not in got or list(got[name].shape) != shape or got[name].dtype != base[name].dtype:
                raise Unsliceable(f"the shape of {name} follows it in a way that cannot be cut into slices")
            expected = selected(base[name], axis, [variant.slices[i] for i in compared])
            found = selected(got[name], axis, compared)
            mask = repeat.differing(expected, found)
            if bool(mask.any()):
                first = [int(i) for i in mask.nonzero()[0]]
                number = variant.slices[compared[first[axis]]]
                first[axis] = number
                ulps = repeat.distances(expected, found, mask)
                return _Difference(name, number, first, int(mask.sum()), None if ulps is None else int(ulps.max()))
        return None

    def _confirmed(self, got: Mapping[str, torch.Tensor], variant: _Variant) -> Verdict | None:
        """``None`` where both calls repeat their own bits."""
        for _ in range(_WHILE_SHRINKING if self._so_far.found else _CONFIRMATIONS):
            for before, again in ((self._base, self._call(self._whole)), (got, self._call(variant))):
                if again is None or repeat.first_difference(before, again) is not None:
                    return unknown(NAME, "the same call gives other bits from time to time: `repeat` comes first")
        return None

    def _explained(self, variant: _Variant, found: _Difference) -> Verdict:
        """The finding, and what the slice's bits depend on, by calls with only this slice."""
        dim, number, size = self.dim, found.slice, len(variant.slices)
        axis = self._axes[found.output]
        own = selected(self._base[found.output], axis, [number])
        one = name_of_one(dim, number)
        bits = f"the bits of {one}'s gradient" if self._gradients else f"{one}'s bits"
        kind, sizes = "company", [self.size, size]
        reason = f"{bits} differ between a call with {count_of(dim, self.size)} and one with {count_of(dim, size)}"
        if size == self.size:
            reason = f"{bits} change when the call holds the same slices in another order"
        whole, other = self._uniform(number, self.size, found.output), self._uniform(number, size, found.output)
        if variant.nan:
            kind, reason = "neighbours", f"{bits} change when {_others(dim)} are NaN"
        elif whole is not None and repeat.differ(whole.narrow(axis, number, 1), own):
            kind, reason = "neighbours", f"{bits} depend on what {_others(dim)} hold"
        elif (place := _odd_one(whole, axis)) is not None or (place := _odd_one(other, axis)) is not None:
            kind, reason = "position", f"{bits} depend on its position: at position {place} they are not those at 0"
        elif (
            whole is not None
            and other is not None
            and repeat.differ(whole.narrow(axis, 0, 1), other.narrow(axis, 0, 1))
        ):
            low, high = self._threshold(number, found.output, *sorted((self.size, size)))
            kind, sizes = "size", [low, high]
            between = f"{low} and {count_of(dim, high)}" if _is_plural(dim) else f"{dim}={low} and {dim}={high}"
            reason = f"{bits} change between {between}"
        ulp = "" if found.ulp is None else f" by up to {found.ulp} ulp"
        return failed(
            NAME,
            f"{reason} ({found.output} differs{ulp}, first at {found.first}){self._advice()}",
            identity=f"{NAME}:{dim}:gradients" if self._gradients else f"{NAME}:{dim}",
            output=found.output,
            evidence=SliceDifference(dim, kind, sizes, number, found.first, found.count, found.ulp),
        )

    def _uniform(self, number: int, size: int, output: str) -> torch.Tensor | None:
        """An output of a call with one slice ``size`` times; ``None`` where that fails."""
        try:
            got = self._call(_Variant((number,) * size))
        except OtherCase:
            return None
        if got is None or output not in got or got[output].shape[self._axes[output]] != size:
            return None
        return got[output]

    def _threshold(self, number: int, output: str, low: int, high: int) -> tuple[int, int]:
        """Two sizes between which the bits change: neighbours, unless calls between them fail."""
        axis = self._axes[output]
        start = self._uniform(number, low, output)
        while start is not None:
            middle = next((size for size in _between(low, high) if self.batches.fits(size)), None)
            got = None if middle is None else self._uniform(number, middle, output)
            if middle is None or got is None:
                break
            if repeat.differ(got.narrow(axis, 0, 1), start.narrow(axis, 0, 1)):
                high = middle
            else:
                low = middle
        return low, high

    def _advice(self) -> str:
        if not self._gradients:
            return ""
        return (
            f"; outputs keep theirs. invariant= covers the gradients of inputs with {self.dim} too; "
            f"without={{{GRADIENTS!r}: 'reason'}} leaves them out"
        )


def _between(low: int, high: int) -> Iterator[int]:
    """The integers between two, from the middle outwards."""
    middle = (low + high) // 2
    for by in range(high - low):
        yield from (size for size in dict.fromkeys((middle - by, middle + by)) if low < size < high)


def _odd_one(t: torch.Tensor | None, axis: int) -> int | None:
    """The first position whose bits differ from position 0."""
    if t is None:
        return None
    mask = repeat.differing(t, t.narrow(axis, 0, 1).expand_as(t)).movedim(axis, 0).reshape(t.shape[axis], -1).any(1)
    return int(mask.nonzero()[0]) if bool(mask.any()) else None


def name_of_one(dim: str, number: int) -> str:
    """``row 3`` for a dim called ``rows``."""
    return f"{dim[:-1]} {number}" if _is_plural(dim) else f"slice {number} along {dim}"


def _others(dim: str) -> str:
    return f"other {dim}" if _is_plural(dim) else f"other slices along {dim}"


def _is_plural(dim: str) -> bool:
    return dim.endswith("s") and not dim.endswith(("ss", "es"))


def count_of(dim: str, count: int) -> str:
    return f"{count} {dim}" if _is_plural(dim) else f"{dim}={count}"
