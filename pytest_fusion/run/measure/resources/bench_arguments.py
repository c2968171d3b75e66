"""One row of ``bench=`` as the arguments of a call: plain layouts, its sizes, values that cost nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pytest_fusion.case.choosing.search import pools
from pytest_fusion.case.make import make_inputs
from pytest_fusion.case.plan import Limits, make_plan
from pytest_fusion.case.stated import admitting, stated_case
from pytest_fusion.errors import SpecError
from pytest_fusion.spec.fusion_spec import FusionSpec

# Dims by name, and where wanted the case's dtype, drawn inputs by value, and optional ones that are absent as None.
Sizes = Mapping[str, Any]

_SEED = 0


def arguments_of(spec: FusionSpec, sizes: Sizes) -> dict[str, Any]:
    """The inputs at ``sizes``, contiguous, floating ones zero; what is not named is as plain as the spec admits.

    Raises ``SpecError`` for a name that is none, a dim that is left out, and a size that is too small or not the
    multiple that it must be.
    """
    for name in spec.dim_names:
        if name not in sizes:
            raise SpecError(f"{spec.name}: the sizes {dict(sizes)} leave out {name!r}; add it")
    plan = make_plan(admitting(spec, [sizes]), pools=pools(spec, _SEED), limits=Limits())
    return make_inputs(spec, stated_case(plan, sizes, _SEED, where="sizes"), torch.device("cpu"), zeros=True)
