"""One row of ``bench=`` as the arguments of a call: plain layouts, the sizes asked for, values that cost nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pytest_fusion.case.make import make_inputs
from pytest_fusion.case.plan import Limits, build, make_plan
from pytest_fusion.case.search import pools
from pytest_fusion.errors import SpecError, did_you_mean
from pytest_fusion.spec.dtypes import normalise_dtypes
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import OptionalSpec, StrategySpec, unwrap

# Dims by name, and where wanted the case's dtype, drawn inputs by value, and optional ones that are absent as None.
Sizes = Mapping[str, Any]

_UNBOUNDED = 1 << 60
_SEED = 0


def arguments_of(spec: FusionSpec, sizes: Sizes) -> dict[str, Any]:
    """The inputs at ``sizes``, contiguous, floating ones zero; what is not named is as plain as the spec admits.

    Raises ``SpecError`` for a name that is none, a dim that is left out, and a size outside its bounds.
    """
    choice = _choice(spec, sizes)
    plan = make_plan(spec, pools=pools(spec, _SEED), limits=Limits(_UNBOUNDED, _UNBOUNDED, 0))
    case = build(plan, choice, _SEED)
    for name, wanted in sizes.items():
        found = case.sizes.get(name, wanted)
        if found != (tuple(wanted) if isinstance(wanted, list) else wanted):
            raise SpecError(f"{spec.name}: {name}={wanted} is not within its bounds, {spec.bound(name)}")
    return make_inputs(spec, case, torch.device("cpu"), zeros=True)


def _choice(spec: FusionSpec, sizes: Sizes) -> dict[str, Any]:
    choice: dict[str, Any] = {}
    for name, value in sizes.items():
        declared = spec.inputs.get(name)
        if name in spec.dim_names:
            choice[f"dim {name}"] = tuple(value) if isinstance(value, list) else value
        elif name == "dtype":
            choice["dtype"] = normalise_dtypes(value, where=f"{spec.name}: dtype")[0]
        elif isinstance(declared, OptionalSpec) and value is None:
            choice[f"present {name}"] = False
        elif declared is not None and isinstance(unwrap(declared), StrategySpec):
            choice[f"value {name}"] = value
        else:
            known = {*spec.dim_names, "dtype", *spec.inputs}
            raise SpecError(f"{spec.name}: {name}={value!r} names no dim and no drawn input{did_you_mean(name, known)}")
    for name in spec.dim_names:
        if name not in sizes:
            raise SpecError(f"{spec.name}: the sizes {dict(sizes)} leave out {name!r}; add it")
    return choice
