"""Calls that break a spec in one way each, derived from a case that passed.

The same case always gives the same calls, so a finding needs no more than its case. What the spec does not state cannot
be broken: indices and offsets that a function computes, sizes of derived inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pytest_fusion.case.case_model import Case, Layout
from pytest_fusion.case.layouts import geometry
from pytest_fusion.case.make import bound, chosen, torch_dtype
from pytest_fusion.run.placing import Placed, place
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import TensorSpec
from pytest_fusion.spec.values import ValueProfile

# Past any guard zone, and within 32 bits.
_FAR = 1 << 20
_INDICES = ("indices", "page_table", "routing")


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """A call with one broken ``argument``: ``how``, with ``detail``, and the ``line`` that would refuse it.

    ``twin``: the input whose memory the argument gets.
    """

    kind: str
    argument: str
    how: str
    detail: str
    line: str
    logical: Mapping[str, Any]
    case: Case
    twin: str = ""

    @property
    def name(self) -> str:
        return f"{self.argument}: {self.how}"

    def place(self, device: torch.device, fill: str) -> Placed:
        """The arguments in guarded memory."""
        placed = place(self.logical, self.case, device, fill)
        if self.twin:
            placed.arguments[self.argument] = placed.arguments[self.twin]
        if self.kind == "device":
            placed.arguments[self.argument] = self.logical[self.argument]
        placed.arena.snapshot()
        return placed


@dataclass(frozen=True, slots=True)
class _Given:
    """A right call, with the ``tensors`` that are present in it."""

    spec: FusionSpec
    case: Case
    logical: Mapping[str, Any]
    tensors: Mapping[str, TensorSpec]

    def broken(self, kind: str, name: str, how: str, detail: str, line: str, value: torch.Tensor) -> BrokenCall:
        return BrokenCall(kind, name, how, detail, line, {**self.logical, name: value}, self.case)


def broken_calls(spec: FusionSpec, case: Case, logical: Mapping[str, Any], device: torch.device) -> list[BrokenCall]:
    """The calls in the order in which they run: those that may destroy a CUDA context last."""
    tensors = {name: inner for name, inner in spec.tensors.items() if isinstance(logical[name], torch.Tensor)}
    # The gaps of other layouts would take in an access past the end.
    plain = case.contiguous(name for name, inner in tensors.items() if "contiguous" in inner.layouts)
    given = _Given(spec, plain, logical, tensors)
    calls = [*(_devices(given, device) if device.type == "cuda" else ()), *_dtypes(given), *_overlaps(given)]
    return [*calls, *_strides(given), *_sizes(given), *_numbers(given)]


def _devices(given: _Given, device: torch.device) -> Iterator[BrokenCall]:
    for name in given.tensors:
        line = f"if not {name}.is_cuda: raise ValueError(f'{name} is on {{{name}.device}}')"
        yield given.broken("device", name, "on the CPU", f"others are on {device}", line, given.logical[name].cpu())


def _dtypes(given: _Given) -> Iterator[BrokenCall]:
    ways: tuple[str, ...] = ("float64", "int32")
    for name, inner in given.tensors.items():
        value, allowed = given.logical[name], inner.dtypes or tuple(given.spec.dtypes)
        if not value.is_floating_point():
            continue
        known = ", ".join(f"torch.{dtype}" for dtype in allowed)
        for other in ways:
            line = f"if {name}.dtype not in ({known},): raise TypeError(f'{name}: {{{name}.dtype}}')"
            if other not in allowed:
                detail = f"in place of {str(value.dtype).removeprefix('torch.')}"
                yield given.broken("dtype", name, other, detail, line, value.to(torch_dtype(other)))
        ways = ways[:1]


def _overlaps(given: _Given) -> Iterator[BrokenCall]:
    for written in given.spec.mutates:
        target = given.logical[written]
        for name in given.tensors if isinstance(target, torch.Tensor) else ():
            value = given.logical[name]
            if name not in given.spec.given_up and (value.shape, value.dtype) == (target.shape, target.dtype):
                line = f"if {name}.data_ptr() == {written}.data_ptr(): raise ValueError('{name} is {written}')"
                call = given.broken("overlap", name, f"the memory of {written}", "which is written", line, target)
                yield replace(call, twin=written)
                break


def _strides(given: _Given) -> Iterator[BrokenCall]:
    for name, inner in given.tensors.items():
        shape = tuple(given.logical[name].shape)
        own = geometry(shape, given.case.tensors[name].layout).strides
        for kind in ("transposed", "step", "padded"):
            strides = geometry(shape, Layout(kind)).strides
            differ = any(x != y for x, y, size in zip(strides, own, shape, strict=True) if size > 1)
            if kind not in inner.layouts and differ:
                case = given.case.with_tensor(name, layout=Layout(kind))
                detail, line = f"strides {strides} in place of {own}", f"{name} = {name}.contiguous()"
                yield BrokenCall("stride", name, f"{kind} strides", detail, line, given.logical, case)
                break


def _resized(value: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """The tensor with so many slices along an axis: fewer, or copies of its last one."""
    made = value.new_empty((*value.shape[:axis], size, *value.shape[axis + 1 :]))
    for at in range(size):
        made.select(axis, at).copy_(value.select(axis, min(at, value.shape[axis] - 1)))
    return made


def _sizes(given: _Given) -> Iterator[BrokenCall]:
    holders: dict[str, list[tuple[str, int]]] = {}
    for name, inner in given.tensors.items():
        axis = 0
        for term in inner.shape.terms:
            width = len(term.evaluate(given.case.sizes))
            if width and term.names:
                holders.setdefault(term.text, []).append((name, axis))
            axis += width
    for dim, ((first, at), *others) in holders.items():
        for name, axis in others:
            value = given.logical[name]
            size = value.shape[axis]
            line = f"if {name}.shape[{axis}] != {first}.shape[{at}]: raise ValueError(f'{name}: {{{name}.shape}}')"
            for how, other in (("shorter", size - 1), ("longer", size + 1)) if size > 1 else ():
                made = _resized(value, axis, other)
                yield given.broken("size", name, f"one {how} along {dim}", f"{first} has {size}", line, made)


def _numbers(given: _Given) -> Iterator[BrokenCall]:
    """Wrong indices and offsets."""
    for name, inner in given.tensors.items():
        value, values = given.logical[name], inner.values
        profile = chosen(values, given.case.tensors[name].regime)[0] if isinstance(values, ValueProfile) else None
        if profile is None or profile.kind not in (*_INDICES, "offsets") or not value.numel():
            continue
        size = dict(profile.params)["size"]
        end = int(bound(size, given.case.sizes))
        if profile.kind == "offsets":
            ways = {"not monotone": (end + 1, [0]), "past the end": (end + 1, [-1])}
            right = f"{end} is the last"
            line = f"length = tl.maximum(tl.minimum(end, {size}) - tl.maximum(begin, 0), 0) in the kernel"
        else:
            # One of them alone may be unused, as a page past the end of its sequence is.
            numbers = {"one past the end": end, "far past the end": end + _FAR, "negative": _below(values)}
            ways = {how: (number, [0, -1]) for how, number in numbers.items() if number is not None}
            right = f"0 to {end - 1} are right"
            line = f"mask=(index >= 0) & (index < {size}) where the kernel uses it"
        for how, (number, places) in ways.items():
            if torch.iinfo(value.dtype).min <= number <= torch.iinfo(value.dtype).max:
                broken = value.clone()
                broken.view(-1)[places] = number
                yield given.broken("numbers", name, how, f"{number} where {right}", line, broken)


def _below(profile: Any) -> int | None:
    """The first negative number that no choice of a profile may draw; ``None`` where they may draw any."""
    choices = [profile, *profile.choices, *(inner for choice in profile.choices for inner in choice.choices)]
    if {choice.kind for choice in choices} - {*_INDICES, "one_of"}:
        return None
    return -2 if any(choice.label == "holes" for choice in choices) else -1
