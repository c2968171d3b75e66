"""The cases that ``bench=`` names, and their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.case.plan import Limits, Plan, make_plan
from pytest_fusion.case.stated import admitting, stated_case, stated_choice, stated_size
from pytest_fusion.errors import SpecError
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import did_you_mean

# An entry without a dtype gets the first of these usual dtypes that the spec takes.
_USUAL = ("bfloat16", "float16", "float32")
_SEED = 0
# A smaller case of the same kind halves a size above this.
_LARGE = 256


@dataclass(frozen=True, slots=True)
class Entry:
    """One complete entry of ``bench=``; baselines know it by its ``text``, sizes and dtype."""

    text: str
    given: Mapping[str, Any]
    case: Case


def entries(spec: FusionSpec) -> list[Entry]:
    """The cases of ``bench=``: contiguous, of ordinary values, the same in every run. Raises ``SpecError``."""
    if not spec.bench:
        return []
    complete = [_complete(spec, given) for given in spec.bench]
    plan = _plan(spec, complete)
    found: dict[str, Entry] = {}
    for named in complete:
        entry = _entry(plan, named)
        if entry.text in found:
            raise SpecError(f"{spec.name}: bench= names the case {entry.text} twice; leave one out")
        found[entry.text] = entry
    return list(found.values())


def check(spec: FusionSpec) -> None:
    """Raises ``SpecError`` for an entry of ``bench=`` that is no mapping, lacks a size, or has an unknown name."""
    for given in spec.bench:
        _complete(spec, given)


def smaller(spec: FusionSpec, entry: Entry) -> Entry | None:
    """The entry with its first large size halved, so first fewer rows; ``None`` without one. Raises ``SpecError``."""
    dims = [name for name in entry.given if name in spec.dim_names]
    large = [name for name in dims if _largest(entry.given[name]) > _LARGE]
    if not large:
        return None
    named = {**entry.given, large[0]: _halved(entry.given[large[0]])}
    return _entry(_plan(spec, [named]), named)


def _plan(spec: FusionSpec, every: Iterable[Mapping[str, Any]]) -> Plan:
    return make_plan(admitting(spec, every), pools=searching.pools(spec, _SEED), limits=Limits())


def _entry(plan: Plan, named: Mapping[str, Any]) -> Entry:
    return Entry(text_of(named), named, stated_case(plan, named, _SEED, where="bench"))


def _largest(size: Any) -> int:
    return max(size, default=0) if isinstance(size, (tuple, list)) else int(size)


def _halved(size: Any) -> Any:
    """A number, or a tuple with its largest number halved."""
    if not isinstance(size, (tuple, list)):
        return int(size) // 2
    at = size.index(max(size))
    return (*size[:at], size[at] // 2, *size[at + 1 :])


def text_of(given: Mapping[str, Any]) -> str:
    """``"rows=8192 hidden=4096 bfloat16"``: sizes in the order given, then the dtype, then the rest."""
    words = [f"{name}={_size(value)}" for name, value in given.items() if name != "dtype"]
    dtype = given.get("dtype")
    return " ".join([*words, *([str(dtype).removeprefix("torch.")] if dtype is not None else [])])


def _size(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _complete(spec: FusionSpec, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise SpecError(f"{spec.name}: bench={given!r}; expected a list of dicts such as {{'rows': 8192, 'n': 4096}}")
    unknown = [name for name in given if name not in (*spec.dim_names, *spec.inputs, "dtype", "values")]
    if unknown:
        known = (*spec.dim_names, "dtype")
        raise SpecError(f"{spec.name}: bench= has {unknown[0]!r}{did_you_mean(str(unknown[0]), known)}")
    fixed = {name for name, bound in spec.dims.items() if bound.min == bound.max}
    lacking = [name for name in spec.dim_names if name not in given and name not in fixed]
    if lacking:
        listed = ", ".join(f"{name!r}: ..." for name in lacking)
        raise SpecError(f"{spec.name}: the entry {dict(given)} of bench= leaves sizes open; add {listed}")
    named = {**{name: spec.dims[name].min for name in fixed}, **given}
    if "dtype" not in named:
        named["dtype"] = next((name for name in _USUAL if name in spec.dtypes), spec.dtypes[0])
    stated_choice(spec, named, where="bench")
    return named | {name: stated_size(spec, name, named[name], where="bench") for name in spec.dim_names}
