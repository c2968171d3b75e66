"""A case with more rows to draw from: one call gives many draws, in other rows or in equal ones."""

from __future__ import annotations

import math

from pytest_fusion.case import sizes
from pytest_fusion.case.case_model import Case, Layout
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.case.plan import cost, refit
from pytest_fusion.checks.context import CaseResult, reference_of
from pytest_fusion.checks.trial import Trial
from pytest_fusion.oracle.reference import ReferenceFailed

# Rows, and elements of the largest tensor: an interpreted call of so many takes little longer than one of few.
_ROWS, _ELEMENTS = 2048, 1 << 14


def of_many_rows(trial: Trial, *, equal: bool) -> Trial:
    """The case with more rows, ``equal`` ones where layouts allow that; unchanged where no dim adds any."""
    context, before = trial.context, {name: p.shape for name, p in trial.sampled.items()}
    for dim in trial.spec.sized:
        try:
            case = _resized(trial, dim, equal=equal)
            with context.clock.phase("make"):
                logical = make_inputs(trial.spec, case, context.device)
            reference, expected = reference_of(context, case, logical, priced=False)
        except (ImpossibleCase, InputFailed, ReferenceFailed):
            continue
        made = Trial(context, CaseResult(case), logical, reference, expected, trial.alone)
        after = {name: p.shape for name, p in made.sampled.items()}
        if all(after[n][-1:] == s[-1:] and math.prod(after[n]) > math.prod(s) for n, s in before.items()):
            return made
    return trial


def _resized(trial: Trial, dim: str, *, equal: bool) -> Case:
    """The case with more of the dim; with ``equal``, tensors whose first dim it is repeat one slice."""
    case, size = trial.result.case, _ROWS
    while size > sizes.count(case.sizes[dim]):
        other = case.with_(sizes=refit(trial.spec, {**case.sizes, dim: size}))
        if cost(trial.spec, other)[0] <= _ELEMENTS:
            break
        size //= 2
    else:
        raise ImpossibleCase(f"no more of {dim}")
    for name, inner in trial.spec.tensors.items() if equal else ():
        if (
            name in other.tensors
            and "expanded" in inner.layouts
            and inner.shape.terms[:1]
            and inner.shape.terms[0].names == (dim,)
        ):
            other = other.with_tensor(name, layout=Layout("expanded"))
    return other
