"""Cases of few elements whose offsets do not fit 32 bits: one axis of a tensor is strided past 2^31 elements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from pytest_fusion.case import counter_random, layouts
from pytest_fusion.case.case_model import Case, Layout
from pytest_fusion.case.make import ImpossibleCase, shape_of, torch_dtype
from pytest_fusion.case.plan import Plan, build
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import TensorSpec

KIND = "large"
_VARIANTS = 3
# At least three slices: the stride fits 32 bits and the last offset does not. 40 is no multiple of a block, and 40 x 40
# x 5 elements touch few pages.
_SIZES = (3, 40, 5, 17)
_BATCH = (3,)


def far_tensors(spec: FusionSpec, case: Case) -> dict[str, int]:
    """The tensors of a case with offsets beyond 2^31 elements, each with the bytes of its storage."""
    found: dict[str, int] = {}
    for name, entry in case.tensors.items():
        if entry.layout.kind != KIND or name in case.absent:
            continue
        shape = shape_of(spec.tensors[name], case.sizes)
        if layouts.goes_far(shape, entry.layout):
            found[name] = layouts.geometry(shape, entry.layout).storage * torch_dtype(entry.dtype).itemsize
    return found


def goes_far(spec: FusionSpec, case: Case) -> bool:
    """Whether any tensor of the case has offsets beyond 2^31 elements."""
    return bool(far_tensors(spec, case))


def allowed(inner: TensorSpec, shape: tuple[int, ...], variant: int) -> bool:
    """Whether the spec's layouts cover this one: far rows are padded, a far last axis is a transposed matrix."""
    axis = layouts.far_axis(shape, variant)
    if axis is None:
        return False
    if axis < len(shape) - 1:
        return "padded" in inner.layouts
    return "step" in inner.layouts or "transposed" in inner.layouts


def cases(plan: Plan, base: int, count: int) -> Iterator[Case]:
    """Up to ``count`` cases with one far tensor each: every tensor in every way that its layouts allow."""
    spec, made = plan.spec, 0
    known: set[str] = set()
    for turn in range(len(_SIZES)):
        sizes = _SIZES[turn:] + _SIZES[:turn]
        dims: dict[str, Any] = {f"dim {n}": s for n, s in zip(spec.dim_order, itertools.cycle(sizes), strict=False)}
        dims |= {f"dim {name}": _BATCH for name in spec.batch_names}
        for (name, inner), variant in itertools.product(spec.tensors.items(), range(_VARIANTS)):
            dtype = {"dtype": spec.dtypes[(turn + made) % len(spec.dtypes)]} if spec.uses_case_dtype else {}
            try:
                case = build(plan, {**dims, **dtype}, counter_random.mix(base, "large", turn, name, variant) >> 33)
                case = case.with_tensor(name, layout=Layout(KIND, variant=variant))
                shape = shape_of(inner, case.sizes)
            except ImpossibleCase:
                continue
            key = repr((name, shape, layouts.geometry(shape, case.tensors[name].layout).strides))
            if key in known or not allowed(inner, shape, variant) or not goes_far(spec, case):
                continue
            known.add(key)
            yield case
            made += 1
            if made == count:
                return
