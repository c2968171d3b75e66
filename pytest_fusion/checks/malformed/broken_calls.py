"""Calls that break a spec in one way each, derived from a case that passed.

The same case always gives the same calls, so a finding needs no more than its case. What the spec does not state cannot
be broken: indices and offsets that a function computes, sizes of derived inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pytest_fusion.case.case_model import Case, Layout
from pytest_fusion.case.layouts import geometry, variants
from pytest_fusion.case.make import INDICES, bounds_of, chosen, torch_dtype
from pytest_fusion.run.placing import Placed, place
from pytest_fusion.spec.dims import Shape, Size
from pytest_fusion.spec.dtypes import FLOATING
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import TensorSpec
from pytest_fusion.spec.values import ValueProfile

Kind = Literal["index", "offsets", "dtype", "size", "stride", "overlap", "device"]

# Past any guard zone, and within 32 bits.
_FAR = 1 << 20
# Neither is a dtype of a usual kernel; the first is also what NumPy's numbers become.
_OTHER_DTYPES = ("float64", "int32")
_STRIDED = ("transposed", "step", "padded")
# Parts of messages that state what is wrong without the argument's name, as torch's own do.
_WORDS: Mapping[Kind, tuple[str, ...]] = {
    "index": ("index", "indices", "range", "bounds"),
    "offsets": ("offset", "offsets", "index", "range", "bounds", "monotone"),
    "dtype": ("dtype", "dtypes", "type", "types", "double", "float64", "fp64", "int", "int32", "integer"),
    "size": ("size", "sizes", "shape", "shapes", "dimension", "dimensions", "length"),
    "stride": ("stride", "strides", "contiguous", "layout"),
    "overlap": ("overlap", "memory", "alias"),
    "device": ("device", "devices", "cpu"),
}


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """A call with one broken ``argument``: ``how``, with ``detail``, and the ``line`` that would refuse it.

    ``twin``: the input whose memory the argument gets.
    """

    kind: Kind
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

    @property
    def by_values(self) -> bool:
        """Whether values alone are wrong, which a launcher sees only if it waits for the device."""
        return self.kind in ("index", "offsets")

    @property
    def words(self) -> tuple[str, ...]:
        """Words of which an exception must have one to state what is wrong."""
        value = self.logical[self.argument]
        sizes = tuple(map(str, value.shape)) if self.kind == "size" else ()
        return (self.argument, *_WORDS[self.kind], *sizes)

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

    def broken(self, kind: Kind, name: str, value: torch.Tensor, how: str, detail: str, line: str) -> BrokenCall:
        return BrokenCall(kind, name, how, detail, line, {**self.logical, name: value}, self.case)


def broken_calls(spec: FusionSpec, case: Case, logical: Mapping[str, Any], device: torch.device) -> list[BrokenCall]:
    """The calls in the order in which they run: those that may destroy a CUDA context last."""
    tensors = {name: inner for name, inner in spec.tensors.items() if isinstance(logical[name], torch.Tensor)}
    # The gaps of other layouts would take in an access past the end.
    plain = case.contiguous(name for name, inner in tensors.items() if "contiguous" in inner.layouts)
    given = _Given(spec, plain, logical, tensors)
    calls = [*_devices(given, device), *_dtypes(given), *_overlaps(given), *_strides(given)]
    return [*calls, *_sizes(given), *_offsets(given), *_indices(given)]


def not_tried(device: torch.device) -> list[str]:
    """The ways to break a call that this device does not have."""
    return [] if device.type == "cuda" else ["another device: only a GPU has one"]


def _profile(given: _Given, name: str) -> ValueProfile | None:
    values = given.tensors[name].values
    return chosen(values, given.case.tensors[name].regime)[0] if isinstance(values, ValueProfile) else None


def _indices(given: _Given) -> Iterator[BrokenCall]:
    for name in given.tensors:
        profile, value = _profile(given, name), given.logical[name]
        bounds = bounds_of(profile, given.case.sizes)
        if profile is None or profile.kind not in INDICES or bounds is None or not value.numel():
            continue
        last, size = int(bounds[1]), dict(profile.params)["size"]
        ways = {"one past the end": last + 1, "far past the end": last + _FAR}
        below = _below(given.tensors[name].values)
        if below is not None:
            ways["negative"] = below
        for how, index in ways.items():
            if torch.iinfo(value.dtype).min <= index <= torch.iinfo(value.dtype).max:
                broken = value.clone()
                # One of them alone may be unused, such as a page past the end of its sequence.
                broken.view(-1)[0] = broken.view(-1)[-1] = index
                detail = f"{index} where 0 to {last} are indices"
                line = f"in the kernel, mask what it leads to: mask=(index >= 0) & (index < {size})"
                yield given.broken("index", name, broken, how, detail, line)


def _below(profile: Any) -> int | None:
    """The first negative number that no choice of a profile may draw; ``None`` where they may draw any."""
    choices = [profile, *profile.choices, *(inner for choice in profile.choices for inner in choice.choices)]
    if {choice.kind for choice in choices} - {*INDICES, "one_of"}:
        return None
    return -2 if any(choice.label == "holes" for choice in choices) else -1


def _offsets(given: _Given) -> Iterator[BrokenCall]:
    for name in given.tensors:
        profile, value = _profile(given, name), given.logical[name]
        if profile is None or profile.kind != "offsets" or not value.numel():
            continue
        total = int(value.max())
        line = f"in the kernel, tl.minimum(tl.maximum(end - begin, 0), {dict(profile.params)['size']} - begin)"
        if value.shape[-1] > 1 and total:
            falling = value.clone()
            falling[..., 0], falling[..., 1] = total, 0
            yield given.broken("offsets", name, falling, "not monotone", f"it begins with {total}, 0", line)
        longer = value.clone()
        longer[..., -1] = total + 1
        yield given.broken("offsets", name, longer, "past the end", f"it ends at {total + 1} of {total}", line)


def _dtypes(given: _Given) -> Iterator[BrokenCall]:
    first = True
    for name, inner in given.tensors.items():
        value = given.logical[name]
        allowed = inner.dtypes or tuple(given.spec.dtypes)
        others = [other for other in _OTHER_DTYPES if other not in allowed]
        if not value.is_floating_point():
            continue
        for other in others if first else others[:1]:
            own = str(value.dtype).removeprefix("torch.")
            known = ", ".join(f"torch.{dtype}" for dtype in allowed if dtype in FLOATING)
            line = f"if {name}.dtype not in ({known},): raise TypeError(f'{name}: {{{name}.dtype}}')"
            yield given.broken("dtype", name, value.to(torch_dtype(other)), other, f"{other} in place of {own}", line)
        first = False


def _axes(shape: Shape, sizes: Mapping[str, Size]) -> dict[str, int]:
    """The axis of each plain dim, and the first of a batch."""
    found: dict[str, int] = {}
    axis = 0
    for term in shape.terms:
        width = len(term.evaluate(sizes))
        if width and (term.batch or term.names == (term.text,)):
            found.setdefault(term.names[0], axis)
        axis += width
    return found


def _sizes(given: _Given) -> Iterator[BrokenCall]:
    holders: dict[str, list[tuple[str, int]]] = {}
    for name, inner in given.tensors.items():
        for dim, axis in _axes(inner.shape, given.case.sizes).items():
            holders.setdefault(dim, []).append((name, axis))
    for dim, ((first, at), *others) in holders.items():
        for name, axis in others:
            value = given.logical[name]
            size = value.shape[axis]
            if size < 2:
                continue
            message = f"raise ValueError(f'{name}: {{tuple({name}.shape)}}')"
            line = f"if {name}.shape[{axis}] != {first}.shape[{at}]: {message}"
            last = value.narrow(axis, size - 1, 1)
            for how, other in (
                ("one shorter", value.narrow(axis, 0, size - 1).contiguous()),
                ("one longer", torch.cat([value, last], axis)),
            ):
                detail = f"{other.shape[axis]} where {first} has {size}"
                yield given.broken("size", name, other, f"{how} along {dim}", detail, line)


def _strides(given: _Given) -> Iterator[BrokenCall]:
    for name, inner in given.tensors.items():
        shape = tuple(given.logical[name].shape)
        own = geometry(shape, given.case.tensors[name].layout)
        for kind in _STRIDED:
            other = Layout(kind)
            if kind in inner.layouts or not variants(kind, len(shape)) or 0 in shape:
                continue
            strides = geometry(shape, other).strides
            if all(x == y for x, y, size in zip(strides, own.strides, shape, strict=True) if size > 1):
                continue
            case = given.case.with_tensor(name, layout=other)
            how, detail = f"{kind} strides", f"strides {strides} in place of {own.strides}"
            line = f"{name} = {name}.contiguous()"
            yield BrokenCall("stride", name, how, detail, line, given.logical, case)
            break


def _overlaps(given: _Given) -> Iterator[BrokenCall]:
    for written in given.spec.mutates:
        target = given.logical.get(written)
        for name in given.tensors if isinstance(target, torch.Tensor) else ():
            value = given.logical[name]
            if name in given.spec.given_up or (value.shape, value.dtype) != (target.shape, target.dtype):
                continue
            line = f"if {name}.data_ptr() == {written}.data_ptr(): raise ValueError('{name} is {written}')"
            same = {**given.logical, name: target.clone()}
            how, detail = f"the memory of {written}", f"both are one tensor, and {written} is written"
            yield BrokenCall("overlap", name, how, detail, line, same, given.case, twin=written)
            break


def _devices(given: _Given, device: torch.device) -> Iterator[BrokenCall]:
    if device.type != "cuda":
        return
    for name in given.tensors:
        line = f"if not {name}.is_cuda: raise ValueError(f'{name} is on {{{name}.device}}')"
        yield given.broken("device", name, given.logical[name].cpu(), "on the CPU", f"the others are on {device}", line)
