"""`match`: converts a recorded call into a case of a spec, or says why it is not one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_fusion.canary.recording.call_json import ALIGNED
from pytest_fusion.canary.recording.recorded_file import named_tensors
from pytest_fusion.case import recorded_values, strided
from pytest_fusion.case import sizes as admissible
from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.case.layouts import geometry
from pytest_fusion.case.make import RECORDED_AS, ImpossibleCase, bounds_of, torch_dtype
from pytest_fusion.case.stated import misfit
from pytest_fusion.case.value_json import decode
from pytest_fusion.errors import ReplayError
from pytest_fusion.spec.dims import Size, Term
from pytest_fusion.spec.fusion_spec import FusionSpec, parameters_of
from pytest_fusion.spec.inputs import ConstantSpec, DerivedSpec, OptionalSpec, StrategySpec, TensorSpec, unwrap
from pytest_fusion.spec.values import ValueProfile
from pytest_fusion.spec.wording import brief, grouped

# A case has gaps up to a buffer of this many times the tensor's size.
_GAPS = 16
_MOST_STORAGE = 1 << 26
# CPU allocations start at multiples of this; the remainder of an address is the tensor's alignment.
_CPU_ALIGNED = 64
_SUMS = ("low", "high", "mean", "rms", "absolute")
_MISSING = object()


class UnmatchedError(Exception):
    """The reason why a call is not a case of the spec, as a clause."""


@dataclass(slots=True)
class Matched:
    """A case, with notes on what differs from the recording."""

    case: Case
    notes: list[str] = field(default_factory=list)


def match(
    spec: FusionSpec,
    event: Mapping[str, Any],
    tensors: Path | None = None,
    rename: Mapping[str, str | None] | None = None,
) -> Matched:
    """The case of ``spec`` for a line ``event`` of a recording, with tensor files in the folder ``tensors``. ``rename``
    maps recorded parameters to the spec's names, or to ``None`` to leave them out. Raises ``UnmatchedError``."""
    try:
        return _Matching(spec, event, tensors, rename or {}).matched()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnmatchedError(f"its line is not that of a recording ({brief(error)})") from None


class _Matching:
    def __init__(
        self, spec: FusionSpec, event: Mapping[str, Any], tensors: Path | None, rename: Mapping[str, str | None]
    ) -> None:
        self.spec, self.tensors = spec, tensors
        # The recorded names by those of the spec.
        self.keys = {own: name for name in event["arguments"] if (own := rename.get(name, name)) is not None}
        self.nodes = {own: event["arguments"][name] for own, name in self.keys.items()}
        self.file = named_tensors(event)
        self.seed = int(event.get("seed") or 0)
        self.notes: list[str] = []
        self.absent: list[str] = []
        self.drawn: dict[str, Any] = {}
        self.shapes: dict[str, tuple[TensorSpec, tuple[int, ...]]] = {}

    def matched(self) -> Matched:
        for name, declared in self.spec.inputs.items():
            self._input(name, declared)
        self._others()
        sizes = solve(self.spec, self.shapes, self._hints(), self._unused())
        dtype = self._dtype()
        entries = {
            name: self._tensor(name, inner, sizes)
            if name in self.shapes
            else TensorCase(inner.dtypes[0] if inner.dtypes else dtype, regime=inner.plainest)
            for name, inner in self.spec.tensors.items()
        }
        case = Case(sizes, dtype, entries, tuple(sorted(self.absent)), self.drawn, self.seed)
        wrong = misfit(self.spec, case)
        if wrong is not None:
            raise UnmatchedError(wrong)
        self._sharing()
        return Matched(case, self.notes)

    def _input(self, name: str, declared: Any) -> None:
        inner, node = unwrap(declared), self.nodes.get(name)
        if isinstance(declared, OptionalSpec) and (node is None or _value(node) is None):
            self.absent.append(name)
            if isinstance(inner, StrategySpec):
                self.drawn[name] = None
            return
        if isinstance(inner, DerivedSpec):
            self.notes.append(f"{name!r} is computed by the spec, not as recorded")
        elif isinstance(inner, ConstantSpec):
            self._constant(name, inner, node)
        elif node is None:
            raise UnmatchedError(f"the call has no argument {name!r}")
        elif not isinstance(inner, TensorSpec):
            self.drawn[name] = self._plain_value(name, node)
        elif "tensor" not in node:
            raise UnmatchedError(f"{name!r} is {_shown(node)} where the spec has a tensor {inner.shape.text!r}")
        else:
            self.shapes[name] = inner, tuple(map(int, node["tensor"]))

    def _constant(self, name: str, inner: ConstantSpec, node: Mapping[str, Any] | None) -> None:
        if node is None:
            self.notes.append(f"the call has no argument {name!r}; the spec's value is used")
        elif "value" in node:
            value = self._plain_value(name, node)
            if _number(value) and _number(inner.value):
                same = value == inner.value or (value != value and inner.value != inner.value)
            else:
                same = _equal(value, inner.value)
            if not same:
                raise UnmatchedError(f"{name}={value!r} where the spec always has {inner.value!r}")
        else:
            self.notes.append(f"{name!r} is the spec's constant, not as recorded")

    def _plain_value(self, name: str, node: Mapping[str, Any]) -> Any:
        if "value" not in node:
            raise UnmatchedError(f"{name!r} is {_shown(node)}, which a case cannot hold")
        try:
            return decode(node["value"])
        except ReplayError as error:
            raise UnmatchedError(f"{name!r}: {error}") from None

    def _others(self) -> None:
        """Raises ``UnmatchedError`` for an argument that the spec lacks, unless it has the kernel's default."""
        parameters = parameters_of(self.spec.fused) or {}
        for name, node in self.nodes.items():
            if name in self.spec.inputs or node.get("default") or _value(node) is None:
                continue
            known = parameters.get(name)
            default = known.default if known is not None else _MISSING
            if _value(node) is _MISSING or not _equal(_value(node), default):
                raise UnmatchedError(f"{name} is {_shown(node)}, and the spec has no input of that name")

    def _hints(self) -> dict[str, int]:
        """Sizes of dims from plain arguments of the same name, and from the largest index into them."""
        hints: dict[str, int] = {}
        for name, (inner, _) in self.shapes.items():
            profile, high = inner.values, (self.nodes[name].get("values") or {}).get("high")
            if isinstance(profile, ValueProfile) and profile.kind == "indices" and high is not None:
                size = dict(profile.params)["size"]
                if isinstance(size, str) and size.isidentifier():
                    hints[size] = max(hints.get(size, 0), int(high) + 1)
        for name in self.spec.dim_names:
            value = _value(self.nodes.get(name, {}))
            if type(value) is int and value >= 0:
                hints[name] = value
        return hints

    def _unused(self) -> frozenset[str]:
        """The dims that only absent inputs have."""
        used = {name for inner, _ in self.shapes.values() for name in inner.shape.names}
        absent = {n for name, inner in self.spec.tensors.items() if name in self.absent for n in inner.shape.names}
        return frozenset(absent - used)

    def _dtype(self) -> str:
        found = {
            self.nodes[name]["dtype"]: name for name, (inner, _) in self.shapes.items() if inner.follows_case_dtype
        }
        if len(found) > 1:
            listed = " and ".join(f"{name!r} {dtype}" for dtype, name in found.items())
            raise UnmatchedError(f"{listed}, but the spec has one dtype for both")
        return str(next(iter(found), self.spec.dtypes[0]))

    def _tensor(self, name: str, inner: TensorSpec, sizes: Mapping[str, Size]) -> TensorCase:
        node = self.nodes[name]
        dtype = str(node["dtype"])
        allowed = inner.dtypes or self.spec.dtypes
        if dtype not in allowed:
            raise UnmatchedError(f"{name!r} is {dtype}, which is not among {', '.join(allowed)}")
        return TensorCase(dtype, self._layout(name, inner, dtype), self._values(name, inner, sizes))

    def _layout(self, name: str, inner: TensorSpec, dtype: str) -> Layout:
        node, (_, shape) = self.nodes[name], self.shapes[name]
        strides = tuple(map(int, node.get("strides") or ()))
        if shape and not strides:
            self.notes.append(f"the strides of {name!r} were not recorded; it is contiguous")
        offset = self._offset(name, inner, torch_dtype(dtype).itemsize)
        if len(strides) != len(shape) or not shape or geometry(shape, Layout()).strides == strides:
            return Layout("contiguous", offset)
        wanted = strided.kinds(shape, strides)
        nearest = next((kind for kind in wanted if kind in inner.layouts), None)
        if wanted and nearest is None:
            raise UnmatchedError(
                f"{name!r} has the strides {strides}, and the spec draws {', '.join(inner.layouts)} only"
            )
        if not strided.admits(shape, strides):
            raise UnmatchedError(f"{name!r} has the strides {strides}, by which elements overlap")
        if strided.expanded(shape, strides) and name in self.spec.given_up:
            raise UnmatchedError(f"{name!r} is written, and its strides {strides} repeat elements")
        made = Layout(strided.stated(strides), offset)
        if geometry(shape, made).storage > max(_GAPS * geometry(shape, Layout()).storage, _MOST_STORAGE):
            self.notes.append(f"{name!r} has the strides {strides}, too far apart for a case: {nearest} instead")
            return Layout(nearest or "contiguous", offset)
        return made

    def _offset(self, name: str, inner: TensorSpec, itemsize: int) -> int:
        """A storage offset with the recorded alignment, not 0 if the recorded offset was not."""
        node = self.nodes[name]
        whole = ALIGNED if node.get("device") == "cuda" else _CPU_ALIGNED
        rest, given = int(node.get("pointer") or 0) % whole, int(node.get("offset") or 0)
        offset = rest // itemsize if rest % itemsize == 0 else 0
        if not offset and given:
            offset = whole // itemsize
        if offset and "offset" not in inner.layouts:
            where = f"{rest} bytes behind a multiple of {whole}" if rest else "inside its storage"
            self.notes.append(f"{name!r} began {where}, and begins its storage in the case: the spec draws no offset")
            return 0
        return offset

    def _values(self, name: str, inner: TensorSpec, sizes: Mapping[str, Size]) -> str:
        node = self.nodes[name]
        seen = dict(node.get("values") or {})
        profile = inner.values
        follows = profile is None
        if isinstance(profile, ValueProfile) and profile.kind in RECORDED_AS:
            follows = True
            self._within(name, profile, seen, sizes)
        ends = {key: float(seen.get(key) or 0.0) for key in ("low", "high", "absolute")}
        extreme = recorded_values.extreme(torch_dtype(str(node["dtype"])), **ends)
        if self.file is not None and self.tensors is not None and "pointer" in node:
            path = str(self.tensors.absolute() / self.file)
            return str(recorded_values.Stored(path, self.keys[name], ordinary=not (extreme or _non_finite(seen))))
        if not seen and 0 not in self.shapes[name][1]:
            self.notes.append(f"the values of {name!r} were not recorded; they are the spec's own")
            return inner.plainest
        if not follows:
            drawn = profile if isinstance(profile, ValueProfile) else "a function"
            self.notes.append(f"the values of {name!r} are the spec's own, {drawn}")
            return inner.plainest
        if not seen:
            return inner.plainest
        shares = {key: float(seen.get(key) or 0.0) for key in ("zeros", "nan", "inf", "ninf")}
        sums = {key: float(seen.get(key) or 0.0) for key in _SUMS}
        return str(recorded_values.fitted(**sums, **shares, extreme=float(extreme)))

    def _within(self, name: str, profile: ValueProfile, seen: Mapping[str, Any], sizes: Mapping[str, Size]) -> None:
        """Raises ``UnmatchedError`` for values that the spec's profile excludes."""
        if _non_finite(seen) and profile.kind != "default":
            raise UnmatchedError(f"{name!r} held NaN or infinities, which values={profile} excludes")
        bounds = bounds_of(profile, sizes)
        if bounds is not None and "low" in seen and not (bounds[0] <= seen["low"] and seen["high"] <= bounds[1]):
            held = f"{name!r} held {seen['low']:g} to {seen['high']:g}"
            raise UnmatchedError(f"{held}, where values={profile} is {bounds[0]:g} to {bounds[1]:g}")

    def _sharing(self) -> None:
        for place, names in grouped((self.nodes[name].get("storage"), name) for name in self.shapes).items():
            if place is not None and len(names) > 1:
                self.notes.append(f"{' and '.join(names)} shared memory; each has its own in the case")


def _non_finite(seen: Mapping[str, Any]) -> bool:
    return bool(seen.get("nan") or seen.get("inf") or seen.get("ninf"))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value(node: Mapping[str, Any]) -> Any:
    """The plain value of a node; ``_MISSING`` if it has none."""
    if "value" not in node:
        return _MISSING
    try:
        return decode(node["value"])
    except ReplayError:
        return _MISSING


def _equal(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # noqa: BLE001 - values that cannot be compared count as different
        return False


def _shown(node: Mapping[str, Any]) -> str:
    if "tensor" in node:
        return f"a tensor {node['tensor']}"
    if "value" in node:
        return repr(_value(node))
    return str(node.get("other") or "a container with tensors")


# Divisors that are tried to invert a quotient or remainder. Dims of kernels have smaller divisors.
_TRIED = 128


def solve(
    spec: FusionSpec,
    tensors: Mapping[str, tuple[TensorSpec, tuple[int, ...]]],
    hints: Mapping[str, int],
    unused: frozenset[str],
) -> dict[str, Size]:
    """A size for every dim of the spec, from the shapes of the call's ``tensors``. Raises ``UnmatchedError``. Other
    dims take their hint (a plain argument, a bound of recorded indices), their only size, or, if ``unused`` (in absent
    inputs), any."""
    found: dict[str, Size] = {}
    equations: list[tuple[str, Term, int]] = []
    for name, (inner, shape) in tensors.items():
        equations += _equations(name, inner, shape, found)
    # Plain names first, so that expressions have fewer unknowns.
    equations.sort(key=lambda one: one[1].names != (one[1].text,))
    before = -1
    while equations and len(equations) != before:
        before = len(equations)
        equations = [one for one in equations if not _solved(*one, found)]
    for name in spec.dim_order:
        if name in found:
            continue
        bound = spec.bound(name)
        wanted = hints.get(name, bound.min if bound.max == bound.min else None)
        if wanted is None and name in unused:
            wanted = max(bound.min, 1)
        if wanted is None:
            raise UnmatchedError(f"the size of {name!r} follows from no argument of the call")
        try:
            found[name] = admissible.fit(wanted, bound, found)
        except ImpossibleCase as error:
            raise UnmatchedError(f"{name!r} has no size: {error}") from None
    for name in spec.batch_names:
        if name not in found:
            if name not in unused:
                raise UnmatchedError(f"the sizes of '*{name}' follow from no argument of the call")
            found[name] = ()
    for name, (inner, shape) in tensors.items():
        try:
            made = inner.shape.evaluate(found)
        except ZeroDivisionError:
            made = ()
        if made != shape:
            raise UnmatchedError(f"{name!r} has the shape {shape} where {inner.shape.text!r} is {made}")
    return found


def _equations(
    name: str, inner: TensorSpec, shape: tuple[int, ...], found: dict[str, Size]
) -> list[tuple[str, Term, int]]:
    """One equation for each dimension; stores the sizes of a ``*batch`` at once."""
    terms = inner.shape.terms
    extra = len(shape) - sum(not term.batch for term in terms)
    if extra < 0 or (extra and not any(term.batch for term in terms)):
        raise UnmatchedError(f"{name!r} has {len(shape)} dimensions where the spec has {inner.shape.text!r}")
    equations, axis = [], 0
    for term in terms:
        if term.batch:
            batch = shape[axis : axis + extra]
            axis += extra
            if found.setdefault(term.names[0], batch) != batch:
                raise UnmatchedError(f"'*{term.names[0]}' is {found[term.names[0]]} and, in {name!r}, {batch}")
        else:
            equations.append((name, term, shape[axis]))
            axis += 1
    return equations


def _solved(name: str, term: Term, size: int, found: dict[str, Size]) -> bool:
    """Whether the equation is solved. Raises ``UnmatchedError`` where it does not hold."""
    unknown = [one for one in term.names if one not in found]
    if len(unknown) > 1:
        return False
    if unknown:
        solutions = _solutions(term, unknown[0], size, found)
        if not solutions:
            raise UnmatchedError(f"{name!r} has a size of {size} where the spec has {term.text!r}")
        if len(solutions) > 1:
            return False  # a quotient: another tensor may decide
        found[unknown[0]] = solutions[0]
    if _term_value(term, found) != size:
        raise UnmatchedError(f"{name!r} has a size of {size} where {term.text!r} is {_term_value(term, found)}")
    return True


def _term_value(term: Term, sizes: Mapping[str, Size]) -> int | None:
    try:
        return term.evaluate(sizes)[0]
    except ZeroDivisionError:
        return None


def _solutions(term: Term, unknown: str, size: int, found: Mapping[str, Size]) -> list[int]:
    """The smallest values of one dim that give this size, at most two."""

    def at(value: int) -> int | None:
        return _term_value(term, {**found, unknown: value})

    zero, one = at(0), at(1)
    candidates = [size] if zero is None or one is None or one == zero else [(size - zero) // (one - zero)]
    # 2*half, seq+1 and heads*width are linear; others are searched for around multiples of the size.
    if not any(value >= 0 and at(value) == size for value in candidates):
        divisors = [part for part in range(1, _TRIED + 1) if at(size * part) == size]
        candidates = [size * part + rest for part in divisors for rest in range(part)]
    return sorted({value for value in candidates if value >= 0 and at(value) == size})[:2]
