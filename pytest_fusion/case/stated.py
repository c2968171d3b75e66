"""A case that the user states, by sizes and levels: an ``@example(...)`` of a test, an entry of ``bench=``.

Also whether a stored case fits a spec, which may have changed since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import index
from typing import Any, SupportsIndex

from pytest_fusion.case import recorded_values, regimes, sizes, strided
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import large_offsets
from pytest_fusion.case.make import ImpossibleCase, chosen, shape_of
from pytest_fusion.case.plan import Limits, Plan, build, regimes_of
from pytest_fusion.errors import SpecError
from pytest_fusion.spec.dims import Size
from pytest_fusion.spec.dtypes import KNOWN, dtype_name
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import LAYOUTS, OptionalSpec, StrategySpec, TensorSpec, unwrap
from pytest_fusion.spec.values import ValueProfile
from pytest_fusion.spec.wording import did_you_mean

# The product of five large sizes exceeds 2^62.
_ANY = 1 << 500


def stated_case(plan: Plan, given: Mapping[str, Any], seed: int, *, where: str) -> Case:
    """The case with exactly the sizes in ``given``, at any cost; raises ``SpecError``, naming ``where``."""
    stated = f"{plan.spec.name}: {where}({', '.join(f'{name}={value!r}' for name, value in given.items())})"
    free = replace(plan, limits=Limits(elements=_ANY, work=_ANY, programs=plan.limits.programs))
    choice = stated_choice(plan.spec, given, where=where)
    try:
        case = build(free, choice, seed)
    except ImpossibleCase as error:
        raise SpecError(f"{stated} gives no case: {error}") from None
    for name, size in case.sizes.items():
        wanted = choice.get(f"dim {name}", size)
        if wanted != size:
            raise SpecError(
                f"{stated} has {name}={wanted}, which {plan.spec.bound(name)} does not admit beside the other sizes; "
                "change one of them"
            )
    return case


def admitting(spec: FusionSpec, every: Iterable[Mapping[str, Any]]) -> FusionSpec:
    """``spec`` without the upper bounds that stated sizes exceed; bounds only limit what is drawn."""
    wider = {
        name: replace(bound, max=None)
        for given in every
        for name in spec.dim_names
        if (bound := spec.bound(name)).max is not None and isinstance(given.get(name), int) and given[name] > bound.max
    }
    return replace(spec, dims={**spec.dims, **wider}) if wider else spec


def stated_size(spec: FusionSpec, name: str, value: Any, *, where: str) -> Size:
    """A dim's size, or a ``*batch``'s sizes, where an integer is one dimension; raises ``SpecError``."""
    batch = name in spec.batch_names
    listed = value if batch and isinstance(value, tuple | list) else (value,)
    if any(not isinstance(one, SupportsIndex) or isinstance(one, bool) or index(one) < 0 for one in listed):
        wanted = "a tuple of whole numbers of 0 or more, such as (8, 128)" if batch else "a whole number of 0 or more"
        raise SpecError(f"{spec.name}: {where}({name}={value!r}); expected {wanted}")
    return tuple(map(index, listed)) if batch else index(value)


def stated_choice(spec: FusionSpec, given: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The choice that ``{"rows": 3, "dtype": torch.float16, "eps": 0.0}`` stands for; raises ``SpecError``."""
    choice: dict[str, Any] = {}
    for name, value in given.items():
        declared = spec.inputs.get(name)
        if name in spec.dim_names:
            choice[f"dim {name}"] = stated_size(spec, name, value, where=where)
        elif name == "dtype":
            choice["dtype"] = dtype_name(value, where=f"{spec.name}: {where}")
            if choice["dtype"] not in spec.dtypes:
                listed = ", ".join(spec.dtypes)
                raise SpecError(f"{spec.name}: {where}(dtype={value}) is not one of dtypes= ({listed}); add it there")
        elif name == "values" and name not in spec.inputs:
            if value not in regimes.REGIMES:
                hint = did_you_mean(str(value), regimes.REGIMES)
                raise SpecError(f"{spec.name}: {where}(values={value!r}) is no regime{hint}")
            choice["values"] = value
        elif value is None and isinstance(declared, OptionalSpec):
            choice[f"present {name}"] = False
        elif declared is not None and isinstance(unwrap(declared), StrategySpec):
            choice[f"value {name}"] = value
        elif name in spec.tensors:
            if value not in LAYOUTS:
                hint = did_you_mean(str(value), LAYOUTS)
                raise SpecError(f"{spec.name}: {where}({name}={value!r}) is no layout{hint}")
            choice[f"layout {name}"] = (value, 0)
        else:
            raise SpecError(
                f"{spec.name}: {where}({name}=...) names no dim, drawn input or tensor; it may give sizes by dim "
                f"({', '.join(spec.dim_names)}), dtype=, values= (a regime), drawn inputs, and layouts by tensor"
            )
    return choice


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
