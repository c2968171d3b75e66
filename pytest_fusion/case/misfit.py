"""Whether a stored case fits a spec, which may have changed since."""

from __future__ import annotations

from pytest_fusion.case import recorded_values, regimes, sizes, strided
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import large_offsets
from pytest_fusion.case.make import ImpossibleCase, chosen, shape_of
from pytest_fusion.case.plan import regimes_of
from pytest_fusion.errors import SpecError
from pytest_fusion.spec.dtypes import KNOWN
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import LAYOUTS, OptionalSpec, StrategySpec, TensorSpec, unwrap
from pytest_fusion.spec.values import ValueProfile
from pytest_fusion.spec.wording import did_you_mean


def misfit(spec: FusionSpec, case: Case) -> str | None:
    """The first thing in ``case`` that ``spec`` lacks or does not allow, as a clause; ``None`` where it fits."""
    inner = {name: unwrap(declared) for name, declared in spec.inputs.items()}
    optional = {name for name, declared in spec.inputs.items() if isinstance(declared, OptionalSpec)}
    return (
        _names("size", set(case.sizes), set(spec.dim_names))
        or _names("tensor", set(case.tensors), set(spec.tensors))
        or _names("drawn value", set(case.drawn), {n for n, d in inner.items() if isinstance(d, StrategySpec)})
        or next(
            (f"it leaves out {name!r}, which is not optional" for name in case.absent if name not in optional), None
        )
        or _sizes(spec, case)
        or next((found for name, d in spec.tensors.items() if (found := _tensor(spec, case, name, d))), None)
    )


def _names(what: str, found: set[str], wanted: set[str]) -> str | None:
    for name in sorted(wanted - found):
        return f"it has no {what} for {name!r}"
    for name in sorted(found - wanted):
        return f"it has a {what} for {name!r}, which the spec does not know{did_you_mean(name, wanted)}"
    return None


def _sizes(spec: FusionSpec, case: Case) -> str | None:
    for name, size in case.sizes.items():
        batch = name in spec.batch_names
        if isinstance(size, tuple) is not batch or min(size if isinstance(size, tuple) else (size,), default=0) < 0:
            return f"{name}={size!r} is no size of that dim"
    for name in spec.dim_order:
        size = case.sizes[name]
        assert isinstance(size, int)
        try:
            allowed = sizes.fit(size, spec.bound(name), case.sizes) == size
        except (ImpossibleCase, ZeroDivisionError):
            allowed = False
        if not allowed:
            return f"{name}={size} is outside of its bounds, {spec.bound(name)}"
    return None


def _tensor(spec: FusionSpec, case: Case, name: str, declared: TensorSpec) -> str | None:
    entry = case.tensors[name]
    dtypes = declared.dtypes or spec.dtypes
    if entry.dtype not in dtypes:
        known = f"that of {name!r} is one of {', '.join(dtypes)}"
        return (
            f"{name!r} has the dtype {entry.dtype}{'' if entry.dtype in KNOWN else ', which does not exist'}; {known}"
        )
    kind = entry.layout.kind
    if (own := strided.parse(kind)) is not None:
        if not _takes(declared, own, case):
            return (
                f"{name!r} has the layout {kind!r}, which none of the spec's layouts ({', '.join(declared.layouts)}) is"
            )
    elif kind not in ("contiguous", large_offsets.KIND, *declared.layouts) and not (
        kind == "pitched" and "padded" in declared.layouts  # rows inside a wider buffer of a chosen width
    ):
        why = "the spec does not draw" if kind in (*LAYOUTS, "pitched") else "does not exist"
        return f"{name!r} has the layout {kind!r}, which {why}"
    if recorded_values.parse(entry.regime) is None:
        try:
            if isinstance(declared.values, ValueProfile) and declared.values.choices:
                chosen(declared.values, entry.regime)
            elif entry.regime not in regimes.REGIMES:
                return f"{name!r} has values of the kind {entry.regime!r}, which does not exist"
        except SpecError as error:
            return f"of {name!r}, {error}"
    drawn = regimes_of(declared, covered=False)
    if drawn and entry.regime in regimes.REGIMES and entry.regime not in drawn:
        return f"{name!r} has values of the kind {entry.regime!r}, which the spec does not draw"
    return None


def _takes(declared: TensorSpec, strides: tuple[int, ...], case: Case) -> bool:
    """Whether the spec's layouts include these strides; a layout that the shape does not admit is contiguous."""
    try:
        shape = shape_of(declared, case.sizes)
    except ImpossibleCase:
        return True
    wanted = strided.kinds(shape, strides) if strided.admits(shape, strides) else ()
    return not wanted or not set(wanted).isdisjoint(declared.layouts)
