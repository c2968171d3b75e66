"""The cases that ``bench=`` names, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_fusion.case import search as searching
from pytest_fusion.case.model import Case
from pytest_fusion.case.plan import Limits, make_plan
from pytest_fusion.case.stated import stated_case
from pytest_fusion.errors import SpecError, did_you_mean
from pytest_fusion.spec.fusion_spec import FusionSpec

# What kernels run in, first to last: an entry that names no dtype gets the first of these that the spec takes.
_USUAL = ("bfloat16", "float16", "float32")
_SEED = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of ``bench=``, complete: its case, and sizes and dtype as the text that baselines know it by."""

    text: str
    given: Mapping[str, Any]
    case: Case


def entries(spec: FusionSpec) -> list[Entry]:
    """The cases of ``bench=``, contiguous and of ordinary values, seeded alike in every run.

    Raises ``SpecError`` for an entry that is no mapping, leaves a size out, or names what the spec has not.
    """
    if not spec.bench:
        return []
    plan = make_plan(spec, pools=searching.pools(spec, _SEED), limits=Limits())
    found: dict[str, Entry] = {}
    for given in spec.bench:
        named = _complete(spec, given)
        case = stated_case(plan, named, _SEED, where="bench")
        entry = Entry(text_of(named), named, case)
        if entry.text in found:
            raise SpecError(f"{spec.name}: bench= names the case {entry.text} twice; leave one out")
        found[entry.text] = entry
    return list(found.values())


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
    return named
