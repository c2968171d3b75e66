"""Outputs of pinned cases for a baseline: the same inputs for every version of a kernel, on any device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pytest_fusion.bench.entries import text_of
from pytest_fusion.bench.output_digest import GoldenOutput, apart, golden_of
from pytest_fusion.case import counter_random
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.case.plan import Limits, build, make_plan
from pytest_fusion.checks.context import Context, call, reference_of
from pytest_fusion.checks.outputs import collect, varies
from pytest_fusion.oracle.reference import ReferenceFailed
from pytest_fusion.run.memory import FILLS
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import brief

# Neither sizes of tiles nor all equal, and powers of two; a kernel takes another path for either.
_SIZES = ((33, 65, 17, 5), (64, 128, 16, 4))
_SEED = 0


def pinned(spec: FusionSpec) -> Iterator[Case]:
    """Contiguous cases of ordinary values in the first dtype of the spec, the same in every run."""
    plan = make_plan(spec, pools=searching.pools(spec, _SEED), limits=Limits())
    known: set[str] = set()
    for turn, sizes in enumerate(_SIZES):
        dims: dict[str, Any] = {f"dim {name}": sizes[i % len(sizes)] for i, name in enumerate(spec.dim_order)}
        dims |= {f"dim {name}": (sizes[0],) for name in spec.batch_names}
        dtype = {"dtype": spec.dtypes[0]} if spec.uses_case_dtype else {}
        try:
            case = build(plan, {**dims, **dtype}, counter_random.mix(_SEED, "golden", turn) >> 33).contiguous()
        except ImpossibleCase:
            continue
        if repr(case.sizes) not in known:
            known.add(repr(case.sizes))
            yield case


def goldens(
    spec: FusionSpec, extra: Mapping[str, Any], device: torch.device, programs: int
) -> list[tuple[str, tuple[GoldenOutput, ...] | str]]:
    """The outputs of each pinned case by its text, or why there are none; what may vary is left out."""
    found: list[tuple[str, tuple[GoldenOutput, ...] | str]] = []
    for case in pinned(spec):
        text = "golden " + text_of({**case.sizes, "dtype": case.dtype})
        try:
            found.append((text, _outputs(Context(spec, device, extra, programs=programs), case)))
        except (ImpossibleCase, InputFailed, ReferenceFailed) as error:
            found.append((text, brief(error.__cause__ or error)))
    return found


def _outputs(context: Context, case: Case) -> tuple[GoldenOutput, ...] | str:
    spec = context.spec
    logical = make_inputs(spec, case, context.device)
    outcome, placed = call(context, case, logical, FILLS[0])
    if outcome.error is not None:
        return brief(outcome.error)
    ours = collect(outcome.result, placed.arguments, spec.mutates).tensors
    reference, _ = reference_of(context, case, logical)
    # Of lanes there are none where the spec insists on a tolerance of its own.
    allowed = dict(zip(ours, map(apart, reference.lanes), strict=False))
    return tuple(
        golden_of(name, one, allowed.get(name)) for name, one in ours.items() if not varies(spec.deterministic, name)
    )
