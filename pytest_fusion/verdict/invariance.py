"""Check `invariance`: a slice along a dim named in ``invariant=`` gives the same bits in whatever company.

The case's own inputs are cut along the dim and called again: a slice alone, all in another order, beside NaN, and
repeated to other sizes around those at which launchers choose between kernels. Outputs and inputs written in place that
follow the dim must keep each slice's bits. Which axis of an output follows it is seen from two sizes. Whether the same
call gives the same bits twice is the business of `repeat`: what is not repeated is no finding here. Left out: the
gradients of inputs, and outputs that ``deterministic=`` allows to vary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pytest_fusion.case import numbers
from pytest_fusion.case.make import ImpossibleCase
from pytest_fusion.case.plan import Limits, cost, refit
from pytest_fusion.run.memory import FILLS
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.values import ValueProfile
from pytest_fusion.verdict import memory, repeat
from pytest_fusion.verdict.calls import allows_chance, call, rejection
from pytest_fusion.verdict.model import Verdict, failed, passed, unknown
from pytest_fusion.verdict.slices import Unsliceable, input_axes, resized, selected, tensors, unsliceable
from pytest_fusion.verdict.trial import Trial

NAME = "invariance"

# A case costs up to a dozen calls, so that few are asked; half of them need not be among those that more is asked of.
# Several dims share the calls of a case.
_MOST_CASES, _ANY_CASES = 6, 3
_MOST_CALLS, _FEWEST_CALLS = 12, 5
# Counted where a finding was made: from then on the cases are those of its shrinking.
_FOUND = "invariance found"
# Where launchers change their mind (GEMV or GEMM, splits, 8 to 256 rows a tile), in groups of which a case takes one
# size each. The multiprocessors, 132 of an H100 where there is no GPU, decide about splits and persistent grids.
_MULTIPROCESSORS = 132
_GROUPS = ((8, 16, 32, 64, 128, 256), (9, 17, 33, 65, 129), (7, 15, 31, 63, 127, 255), (2,))
_LARGEST = 257
# How often both calls of a difference are made again before it counts; while shrinking it has counted before.
_CONFIRMATIONS, _WHILE_SHRINKING = 2, 1


class _OtherCase(Exception):
    """A call at another size, the exception's argument, went wrong by itself."""


def missing(spec: FusionSpec, device: torch.device) -> str | None:  # noqa: ARG001
    """Without ``invariant=`` nobody asks; of a dim that can never be cut nothing can be known."""
    if not spec.invariant:
        return "not asked for: invariant= names no dim"
    reasons = unsliceable(spec)
    return "; ".join(reasons.values()) if len(reasons) == len(spec.invariant) else None


def due(trial: Trial) -> bool:
    """Few cases of a test, those that more is asked of first; every one where a finding is being shrunk."""
    if not _dims(trial):
        return False
    spent = trial.bench.spent
    return bool(spent[_FOUND]) or spent[NAME] < (_MOST_CASES if trial.thorough else _ANY_CASES)


def run(trial: Trial) -> Verdict:
    """Every dim that the case has at least two slices of."""
    bench, dims = trial.bench, _dims(trial)
    bench.spent[NAME] += 1
    reasons = unsliceable(trial.spec)
    sizes: dict[str, list[int]] = {}
    for dim in dims:
        try:
            along = _Along(trial, dim)
            verdict = along.judge(max(_MOST_CALLS // len(dims), _FEWEST_CALLS))
        except Unsliceable as error:
            reasons[dim] = f"{dim}: {error}"
            continue
        except _OtherCase as error:
            if _adopt(trial, dim, error.args[0]):
                return unknown(NAME, f"the kernel fails another check at {dim}={error.args[0]}")
            reasons[dim] = f"{dim}: a call with other slices of the same inputs failed"
            continue
        if verdict is None:
            sizes[dim] = along.seen
        elif verdict.failed:
            bench.spent[_FOUND] += 1
            return verdict
        else:
            reasons[dim] = f"{dim}: {verdict.reason}"
    if reasons:
        return unknown(NAME, "; ".join(reasons.values()), sizes=sizes)
    return passed(NAME, sizes=sizes)


def _dims(trial: Trial) -> list[str]:
    """The dims to ask about in this case."""
    never, sizes = unsliceable(trial.spec), trial.result.case.sizes
    return [
        dim
        for dim in trial.spec.invariant
        if dim not in never and isinstance(size := sizes[dim], int) and size >= 2 and _holds_elements(trial, dim)
    ]


def _holds_elements(trial: Trial, dim: str) -> bool:
    carriers = [trial.logical.get(name) for name, inner in tensors(trial.spec) if dim in inner.shape.names]
    return any(isinstance(t, torch.Tensor) and t.numel() for t in carriers)


def _adopt(trial: Trial, dim: str, size: int) -> bool:
    """Judge the case of another size by itself; where it fails, that is the finding."""
    other = resized(trial.result.case, dim, size)
    alone = trial.alone(other)
    if alone.failure is None or alone.failure.statistical:
        return False
    result = trial.result
    result.case, result.verdicts = alone.case, alone.verdicts
    result.evidence, result.trace, result.launches = alone.evidence, alone.trace, alone.launches
    return True


@dataclass(frozen=True, slots=True)
class _Variant:
    """The slices of one call, by their numbers in the case; every odd one may be ``nan`` instead."""

    slices: tuple[int, ...]
    nan: bool = False

    @property
    def kept(self) -> list[int]:
        """The positions whose bits are compared."""
        return list(range(0, len(self.slices), 2 if self.nan else 1))


@dataclass(frozen=True, slots=True)
class _Difference:
    """Slice ``slice`` of an output, with other bits than in the call as the case has it."""

    output: str
    slice: int
    first: list[int]
    count: int
    ulp: int | None


class _Along:
    """One dim of one case: its slices in other calls."""

    def __init__(self, trial: Trial, dim: str) -> None:
        self.trial, self.dim, self.case = trial, dim, trial.result.case
        size = self.case.sizes[dim]
        assert isinstance(size, int)
        self.size = size
        self.seen: list[int] = []
        self._limits = Limits()
        others = (self.size + 1, self.size - 1, 2 * self.size)
        other = resized(self.case, dim, next((s for s in others if self._fits(s)), self.size))
        self._input_axes = input_axes(trial.spec, self.case, other, trial.logical, dim)
        # Of each output, the axis that follows the dim; known after the first call of another size.
        self._axes: dict[str, int] | None = None

    def judge(self, calls: int) -> Verdict | None:
        """Up to so many calls; ``None`` where every slice kept its bits."""
        whole = _Variant(tuple(range(self.size)))
        base = self._call(whole)
        if base is None:
            raise Unsliceable("a repeated call was refused")
        if not base:
            raise Unsliceable("every output may vary from run to run, as deterministic= allows")
        for variant in self._variants(calls - 1):
            if self._axes is None and len(variant.slices) == self.size:
                continue  # what follows the dim is not known before a call of another size
            got = self._call(variant)
            if got is None:
                continue
            if self._axes is None:
                self._axes = self._following(base, got, len(variant.slices))
            self.seen.append(len(variant.slices))
            found = self._compare(base, got, variant)
            if found is not None:
                return self._confirmed(base, whole, got, variant) or self._explained(base, variant, found)
        if not self.seen:
            raise Unsliceable("no other size of it was accepted")
        return None

    def _fits(self, size: int) -> bool:
        """Whether the spec admits the size beside the case's others, at a cost that a case may have."""
        other = resized(self.case, self.dim, size)
        try:
            if refit(self.trial.spec, other.sizes) != other.sizes:
                return False
            elements, work = cost(self.trial.spec, other)
        except ImpossibleCase:
            return False
        return size <= self.size or (elements <= self._limits.elements and work <= self._limits.work)

    def _variants(self, count: int) -> list[_Variant]:
        """What to call, most telling first. The case alone decides, so that a replay asks the same."""
        size, dim, seed = self.size, self.dim, self.case.seed
        device = self.trial.bench.device
        cores = _MULTIPROCESSORS
        if device.type == "cuda":
            cores = torch.cuda.get_device_properties(device).multi_processor_count
        groups = [*_GROUPS, (cores - 1, cores, cores + 1), (max(size // 2, 1),)]
        chosen = [group[numbers.mix(seed, NAME, dim, i) % len(group)] for i, group in enumerate(groups)]
        largest = next((s for s in range(max(_LARGEST, cores + 1), size, -1) if self._fits(s)), size)
        sizes = dict.fromkeys(s for s in (largest, *chosen) if s not in (1, size) and self._fits(s))
        repeated = [_Variant(tuple(i % size for i in range(s))) for s in sizes]
        alone = [_Variant((size - 1,))] if self._fits(1) else []
        if not alone and not repeated:
            raise Unsliceable("only one size of it is allowed, so that no output can be seen to follow it")
        same = [_Variant(tuple(reversed(range(size))))]
        same += [_Variant(tuple(range(size)), nan=True)] if self._may_be_nan() else []
        # A call of another size comes first: it tells which axes follow the dim.
        first, rest = (alone, repeated) if alone else (repeated[:1], repeated[1:])
        return [*first, *rest[:1], *same, *rest[1:]][:count]

    def _call(self, variant: _Variant) -> dict[str, torch.Tensor] | None:
        """The outputs that may not vary; ``None`` where the kernel refused. Raises ``_OtherCase``."""
        trial, spec = self.trial, self.trial.spec
        outcome, placed = call(trial.bench, self.case, self._logical(variant), FILLS[0])
        if outcome.error is not None and rejection(spec, outcome.error) is not None:
            return None
        accessed = memory.check_access(outcome, chance=allows_chance(spec))
        if outcome.error is not None or accessed is not None or memory.check_damage(outcome.damage).failed:
            if len(variant.slices) != self.size:
                raise _OtherCase(len(variant.slices))
            return None
        found = trial.collect(outcome, placed).tensors
        return {name: t.detach().clone() for name, t in found.items() if not trial.tolerates(name)}

    def _logical(self, variant: _Variant) -> dict[str, Any]:
        logical = dict(self.trial.logical)
        for name, axis in self._input_axes.items():
            logical[name] = selected(logical[name], axis, variant.slices)
        for name in self._may_be_nan() if variant.nan else ():
            logical[name].transpose(0, self._input_axes[name])[1::2] = torch.nan
        return logical

    def _may_be_nan(self) -> list[str]:
        """The inputs whose slices may be NaN. An expanded one holds slice 0 alone, which stays as it is."""
        return [
            name
            for name, inner in tensors(self.trial.spec)
            if name in self._input_axes
            and (inner.values is None or (isinstance(inner.values, ValueProfile) and inner.values.kind == "default"))
            and (dtype := self.trial.logical[name].dtype).is_floating_point
            and dtype.itemsize > 1
        ]

    def _following(
        self, base: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], size: int
    ) -> dict[str, int]:
        """The axis of each output that is as long as the dim in both calls; outputs of one shape do not follow it."""
        axes: dict[str, int] = {}
        for name, t in base.items():
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

    def _compare(
        self, base: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], variant: _Variant
    ) -> _Difference | None:
        """The first slice with other bits than in the case's own call."""
        assert self._axes is not None
        kept = variant.kept
        for name, axis in self._axes.items():
            shape = [len(variant.slices) if i == axis else s for i, s in enumerate(base[name].shape)]
            if name not in got or list(got[name].shape) != shape or got[name].dtype != base[name].dtype:
                raise Unsliceable(f"the shape of {name} follows it in a way that cannot be cut into slices")
            expected = selected(base[name], axis, [variant.slices[i] for i in kept])
            found = selected(got[name], axis, kept)
            mask = repeat.differing(expected, found)
            if bool(mask.any()):
                first = [int(i) for i in mask.nonzero()[0]]
                number = variant.slices[kept[first[axis]]]
                first[axis] = number
                return _Difference(name, number, first, int(mask.sum()), _most_ulp(expected, found, mask))
        return None

    def _confirmed(
        self,
        base: Mapping[str, torch.Tensor],
        whole: _Variant,
        got: Mapping[str, torch.Tensor],
        variant: _Variant,
    ) -> Verdict | None:
        """``None`` where both calls give their own bits again."""
        for _ in range(_WHILE_SHRINKING if self.trial.bench.spent[_FOUND] else _CONFIRMATIONS):
            for before, again in ((base, self._call(whole)), (got, self._call(variant))):
                if again is None or repeat.first_difference(before, again) is not None:
                    return unknown(NAME, "the same call gives other bits from time to time: `repeat` comes first")
        return None

    def _explained(self, base: Mapping[str, torch.Tensor], variant: _Variant, found: _Difference) -> Verdict:
        """The finding, and what the slice's bits depend on: asked of calls that hold nothing but this one slice."""
        dim, number, size = self.dim, found.slice, len(variant.slices)
        assert self._axes is not None
        axis = self._axes[found.output]
        own = selected(base[found.output], axis, [number])
        one = _name_of_one(dim, number)
        kind, sizes = "company", [self.size, size]
        reason = f"{one} has other bits in a call with {_count(dim, self.size)} than in one with {_count(dim, size)}"
        if size == self.size:
            reason = f"{one} has other bits when the call holds the same slices in another order"
        whole, other = self._uniform(number, self.size, found.output), self._uniform(number, size, found.output)
        if variant.nan:
            kind, reason = "neighbours", f"{one}'s bits change when {_others(dim)} are NaN"
        elif whole is not None and repeat.differ(whole.narrow(axis, number, 1), own):
            kind, reason = "neighbours", f"{one}'s bits depend on what {_others(dim)} hold"
        elif (place := _odd_one(whole, axis)) is not None or (place := _odd_one(other, axis)) is not None:
            kind, reason = (
                "position",
                f"{one}'s bits depend on where it lies: at position {place} they are not those at 0",
            )
        elif (
            whole is not None
            and other is not None
            and repeat.differ(whole.narrow(axis, 0, 1), other.narrow(axis, 0, 1))
        ):
            low, high = self._threshold(number, found.output, *sorted((self.size, size)))
            kind, sizes = "size", [low, high]
            between = f"{low} and {_count(dim, high)}" if _is_plural(dim) else f"{dim}={low} and {dim}={high}"
            reason = f"{one}'s bits change between {between}"
        ulp = "" if found.ulp is None else f" by up to {found.ulp} ulp"
        return failed(
            NAME,
            f"{reason} ({found.output} differs{ulp}, first at {found.first})",
            identity=f"{NAME}:{dim}",
            dim=dim,
            depends_on=kind,
            sizes=sizes,
            slice=number,
            output=found.output,
            first=found.first,
            count=found.count,
            ulp=found.ulp,
        )

    def _uniform(self, number: int, size: int, output: str) -> torch.Tensor | None:
        """An output of a call that holds one slice ``size`` times; ``None`` where that call fails."""
        try:
            got = self._call(_Variant((number,) * size))
        except _OtherCase:
            return None
        assert self._axes is not None
        if got is None or output not in got or got[output].shape[self._axes[output]] != size:
            return None
        return got[output]

    def _threshold(self, number: int, output: str, low: int, high: int) -> tuple[int, int]:
        """Two sizes, neighbours unless calls between them fail, from one to the other of which the bits change."""
        assert self._axes is not None
        axis = self._axes[output]
        between = [low, *(s for s in range(low + 1, high) if self._fits(s)), high]
        start = self._uniform(number, low, output)
        left, right = 0, len(between) - 1
        while right - left > 1 and start is not None:
            middle = (left + right) // 2
            got = self._uniform(number, between[middle], output)
            if got is None:
                break
            if repeat.differ(got.narrow(axis, 0, 1), start.narrow(axis, 0, 1)):
                right = middle
            else:
                left = middle
        return between[left], between[right]


def _odd_one(t: torch.Tensor | None, axis: int) -> int | None:
    """The first position whose bits differ from those at position 0."""
    if t is None:
        return None
    mask = repeat.differing(t, t.narrow(axis, 0, 1).expand_as(t)).movedim(axis, 0).reshape(t.shape[axis], -1).any(1)
    return int(mask.nonzero()[0]) if bool(mask.any()) else None


def _most_ulp(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> int | None:
    found = repeat.distances(a, b, mask)
    return None if found is None else int(found.max())


def _name_of_one(dim: str, number: int) -> str:
    """``row 3`` of a dim that is called ``rows``."""
    return f"{dim[:-1]} {number}" if _is_plural(dim) else f"slice {number} along {dim}"


def _others(dim: str) -> str:
    return f"other {dim}" if _is_plural(dim) else f"other slices along {dim}"


def _is_plural(dim: str) -> bool:
    return dim.endswith("s") and not dim.endswith(("ss", "es"))


def _count(dim: str, count: int) -> str:
    return f"{count} {dim}" if _is_plural(dim) else f"{dim}={count}"
