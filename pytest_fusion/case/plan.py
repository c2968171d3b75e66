"""The choices that make a case: factors (sizes, dtype, layouts, offsets, regimes, drawn values) with their levels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pytest_fusion.case import counter_random, layouts, regimes, sizes
from pytest_fusion.case.case_model import Case, Config, Layout, TensorCase
from pytest_fusion.case.make import ImpossibleCase, shape_of
from pytest_fusion.spec.dims import Size
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import LAYOUTS, OptionalSpec, StrategySpec, TensorSpec, unwrap
from pytest_fusion.spec.values import KINDS, ValueProfile

# Batches of no, one and two leading dimensions, one of them empty; beside them a dim's size classes, as rows.
BATCHES: tuple[tuple[int, ...], ...] = ((), (3, 2), (1,), (0,))
_IN_BATCHES = "zero", "one"
# The most rows of a batch: larger blocks are blocks of columns, and interpreting more rows takes time.
_MOST_ROWS = 600
OFFSETS: tuple[int, ...] = (0, 1, 2, 4, 7)
# A '*batch' may have any number of dimensions; its tensor gets layouts of this many.
BATCHED_NDIM = 3
# A factor of the configs of an autotuned kernel; its name follows.
CONFIG = "config "


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one case may cost: elements of the largest tensor, product of all sizes, programs of one launch."""

    elements: int = 1 << 17
    work: int = 1 << 21
    programs: int = 600


@dataclass(frozen=True, slots=True)
class Plan:
    """Factors by name, each with its levels, plainest first; ``pools`` holds drawn values by input."""

    spec: FusionSpec
    factors: Mapping[str, tuple[Any, ...]]
    size_classes: Mapping[str, tuple[int, ...]]
    pools: Mapping[str, tuple[Any, ...]]
    limits: Limits


def allowed_layouts(spec: FusionSpec, name: str, inner: TensorSpec) -> list[tuple[str, int]]:
    """The (kind, variant) pairs of an input, plainest first; without overlaps where the kernel writes."""
    ndim = BATCHED_NDIM if inner.shape.batch_names else len(inner.shape.terms)
    pairs = layouts.choices(inner.layouts, ndim)
    repeatable = name not in spec.given_up and (inner.layouts != LAYOUTS or _may_repeat(inner.values))
    return [pair for pair in pairs if pair[0] != "expanded" or repeatable] or [("contiguous", 0)]


def _may_repeat(values: Any) -> bool:
    """Whether a tensor of these values may repeat one slice; a permutation, or lengths that add up, may not."""
    if not isinstance(values, ValueProfile):
        return values is None
    whole = values.kind in ("permutation", "probabilities", "function") or values.kind in KINDS.keys() - {"indices"}
    return not whole and all(map(_may_repeat, values.choices))


def regimes_of(inner: TensorSpec, *, covered: bool) -> tuple[str, ...]:
    """The regimes that a tensor takes from the case; none where its values are narrowed."""
    profile = ValueProfile("default") if inner.values is None else inner.values
    kind = profile.kind if isinstance(profile, ValueProfile) else "function"
    if not inner.may_float() or kind not in ("default", "finite"):
        return ()
    names = regimes.COVERED if covered else tuple(regimes.REGIMES)
    return tuple(name for name in names if not (kind == "finite" and regimes.is_special(name)))


def _size_levels(spec: FusionSpec, name: str, size_classes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The size classes that give a dim different sizes."""
    bound = spec.bound(name)
    levels: dict[tuple[int, ...], str] = {}
    for label, wanted in size_classes.items():
        if isinstance(bound.multiple_of, str):
            levels[wanted] = label
            continue
        fitted = tuple(sorted({sizes.fit(size, bound, {}) for size in sizes.of_class(wanted, bound)}))
        levels.setdefault(fitted, label)
    return tuple(levels.values())


def _rows(wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of a class that a batch takes."""
    return tuple(size for size in wanted if size <= _MOST_ROWS)


def make_plan(
    spec: FusionSpec,
    *,
    blocks: tuple[int, ...] = (),
    pools: Mapping[str, tuple[Any, ...]] | None = None,
    configs: Mapping[str, int] | None = None,
    limits: Limits,
) -> Plan:
    """The factors of a spec. ``blocks`` and ``configs`` (counts) come from launches; ``pools`` sample strategies."""
    pools = pools or {}
    size_classes = sizes.classes(blocks)
    factors: dict[str, tuple[Any, ...]] = {}
    if spec.uses_case_dtype:
        factors["dtype"] = tuple(spec.dtypes)
    for name in spec.batch_names:
        few = {label: wanted for label, wanted in size_classes.items() if label not in _IN_BATCHES and _rows(wanted)}
        factors[f"dim {name}"] = (*BATCHES, *_size_levels(spec, name, few))
    for name in spec.dim_order:
        factors[f"dim {name}"] = _size_levels(spec, name, size_classes)
    values: dict[str, None] = {}
    for name, declared in spec.inputs.items():
        inner = unwrap(declared)
        if isinstance(declared, OptionalSpec):
            factors[f"present {name}"] = (True, False)
        if isinstance(inner, StrategySpec):
            factors[f"drawn {name}"] = tuple(range(len(pools.get(name, ()))))
        if not isinstance(inner, TensorSpec):
            continue
        factors[f"layout {name}"] = tuple(allowed_layouts(spec, name, inner))
        if "offset" in inner.layouts:
            factors[f"offset {name}"] = OFFSETS
        if len(inner.dtypes) > 1:
            factors[f"dtype {name}"] = inner.dtypes
        values.update(dict.fromkeys(regimes_of(inner, covered=True)))
        if isinstance(inner.values, ValueProfile) and inner.values.choices:
            factors[f"choice {name}"] = tuple(range(len(inner.values.choices)))
    if values:
        factors["values"] = tuple(values)
    for kernel, count in (configs or {}).items():
        factors[f"{CONFIG}{kernel}"] = tuple(range(count))
    return Plan(spec, {name: levels for name, levels in factors.items() if levels}, size_classes, pools, limits)


def build(plan: Plan, choice: Mapping[str, Any], seed: int) -> Case:
    """The case of a choice of levels, fitted to bounds and limits. Raises ``ImpossibleCase``.

    A missing factor takes its plainest level. A size is a class or an integer; an integer for a batch is its rows.
    """
    spec = plan.spec

    def level(factor: str) -> Any:
        return choice.get(factor, plan.factors[factor][0])

    chosen: dict[str, Size] = {}
    for name in spec.sized:
        wanted = level(f"dim {name}")
        if isinstance(wanted, str):
            ladder = sizes.of_class(plan.size_classes[wanted], spec.bound(name))
            ladder = _rows(ladder) if name in spec.batch_names else ladder
            wanted = ladder[counter_random.mix(seed, "size", name) % len(ladder)]
        if name not in spec.batch_names:
            chosen[name] = sizes.fit(wanted, spec.bound(name), chosen)
        else:
            chosen[name] = (
                sizes.leading(wanted, counter_random.mix(seed, "rank", name)) if isinstance(wanted, int) else wanted
            )
    dtype = level("dtype") if "dtype" in plan.factors else spec.dtypes[0]
    tensors: dict[str, TensorCase] = {}
    absent: list[str] = []
    drawn: dict[str, Any] = {}
    for name, declared in spec.inputs.items():
        inner = unwrap(declared)
        if isinstance(declared, OptionalSpec) and not level(f"present {name}"):
            absent.append(name)
        if isinstance(inner, StrategySpec):
            value = choice.get(f"value {name}", ...)
            drawn[name] = plan.pools[name][level(f"drawn {name}")] if value is ... else value
        elif isinstance(inner, TensorSpec):
            kind, variant = level(f"layout {name}")
            offset = level(f"offset {name}") if f"offset {name}" in plan.factors else 0
            own = inner.dtypes[0] if inner.dtypes else dtype
            own = level(f"dtype {name}") if f"dtype {name}" in plan.factors else own
            tensors[name] = TensorCase(own, Layout(kind, offset, variant))
    configs = {
        factor.removeprefix(CONFIG): Config(level(factor))
        for factor in plan.factors
        if factor.startswith(CONFIG) and level(factor)
    }
    case = Case(chosen, dtype, tensors, tuple(absent), drawn, seed, configs=configs)
    return within_limits(plan, with_regimes(spec, case, choice))


def with_regimes(spec: FusionSpec, case: Case, choice: Mapping[str, Any]) -> Case:
    """Give the chosen regime to one tensor or, if it is an ordinary one, sometimes to all that can take it."""
    # NaN everywhere would hide which input is mishandled.
    regime = choice.get("values", "unit")
    takers = [
        name
        for name, inner in spec.tensors.items()
        if name not in case.absent and regime in regimes_of(inner, covered=False)
    ]
    pick = counter_random.mix(case.seed, "focus") % (len(takers) + (not regimes.is_special(regime))) if takers else 0
    for position, name in enumerate(takers):
        if pick in (position, len(takers)):
            case = case.with_tensor(name, regime=regime)
    for name, inner in spec.tensors.items():
        profile = inner.values
        if isinstance(profile, ValueProfile) and profile.choices:
            index = choice.get(f"choice {name}")
            salt = counter_random.mix(case.seed, "values of", name)
            finite = regimes.is_special(regime)
            named = profile.names[0] if index is None else _alternative(profile, index, salt, finite)
            case = case.with_tensor(name, regime=named)
    return case


def _alternative(profile: ValueProfile, index: int, seed: int, finite: bool) -> str:
    """One of several profiles and one of its regimes, if any, chosen by the seed; ``finite``: no special one."""
    chosen, name = profile.choices[index], profile.names[index]
    if chosen.choices:
        inner = counter_random.mix(seed, index) % len(chosen.choices)
        return f"{name}/{_alternative(chosen, inner, counter_random.mix(seed, 1), finite)}"
    if chosen.kind not in ("default", "finite"):
        return name
    names = [name for name in regimes.COVERED if not (regimes.is_special(name) and (finite or chosen.kind == "finite"))]
    return f"{name}/{names[counter_random.mix(seed, index) % len(names)]}"


def cost(spec: FusionSpec, case: Case) -> tuple[int, int]:
    """Elements of the largest tensor, and the product of all sizes. Raises ``ImpossibleCase``."""
    tensors = spec.tensors
    elements = max((math.prod(shape_of(tensors[name], case.sizes)) for name in case.tensors), default=0)
    return elements, math.prod(max(sizes.count(size), 1) for size in case.sizes.values())


def within_limits(plan: Plan, case: Case) -> Case:
    """Halve the largest size until the case fits; raises ``ImpossibleCase`` when its bounds forbid that."""
    while True:
        elements, work = cost(plan.spec, case)
        if elements <= plan.limits.elements and work <= plan.limits.work:
            return case
        plain = {name: sizes.count(size) for name, size in case.sizes.items()}
        for name in sorted(plain, key=lambda n: -plain[n]):
            smaller = sizes.fit(plain[name] // 2, plan.spec.bound(name), case.sizes)
            if smaller < plain[name]:
                try:
                    fitted = refit(plan.spec, {**case.sizes, name: smaller})
                except ImpossibleCase:
                    continue
                case = replace(case, sizes=fitted)
                break
        else:
            smallest, limit = dict(case.sizes), plan.limits.elements
            raise ImpossibleCase(f"the smallest sizes within bounds, {smallest}, exceed the limit of {limit} elements")


def refit(spec: FusionSpec, chosen: Mapping[str, Size]) -> dict[str, Size]:
    """The sizes after one changed: multiples of it follow; a batch may be its rows. Raises ``ImpossibleCase``."""
    fitted: dict[str, Size] = {}
    for name in spec.batch_names:
        batch = chosen[name]
        fitted[name] = (batch,) if isinstance(batch, int) else batch
    for name in spec.dim_order:
        size = chosen[name]
        assert isinstance(size, int)
        fitted[name] = sizes.fit(size, spec.bound(name), fitted)
    return fitted


def in_dtype(spec: FusionSpec, case: Case, dtype: str) -> Case:
    """The case with this dtype, and the tensors that follow it."""
    case = case.with_(dtype=dtype)
    for name in case.tensors:
        if spec.tensors[name].follows_case_dtype:
            case = case.with_tensor(name, dtype=dtype)
    return case
