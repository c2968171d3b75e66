"""A case with more rows to draw from: one call gives many draws, in other rows or in equal ones."""

from __future__ import annotations

from pytest_fusion.case import sizes
from pytest_fusion.case.case_model import Case, Layout
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.case.plan import cost, refit
from pytest_fusion.checks.context import CaseResult, reference_of
from pytest_fusion.checks.trial import Trial
from pytest_fusion.oracle.reference import ReferenceFailed

# Elements of the largest tensor.
_ELEMENTS = 1 << 16


def of_many_rows(trial: Trial, rows: int, *, equal: bool) -> Trial:
    """The case with up to so many rows, ``equal`` ones where layouts allow that; unchanged where no dim gives any."""
    context = trial.context
    for dim in trial.spec.sized:
        try:
            case = _resized(trial, dim, rows, equal=equal)
            with context.clock.phase("make"):
                logical = make_inputs(trial.spec, case, context.device)
            reference, expected = reference_of(context, case, logical, priced=False)
        except (ImpossibleCase, InputFailed, ReferenceFailed):
            continue
        made = Trial(context, CaseResult(case), logical, reference, expected, trial.alone)
        both = [(p, made.sampled[name]) for name, p in trial.sampled.items()]
        same = all(bool((after == after[:1]).all()) for _, after in both)
        if all(p.shape[-1:] == after.shape[-1:] and after.numel() >= p.numel() + (not same) for p, after in both):
            return made
    return trial


def _resized(trial: Trial, dim: str, size: int, *, equal: bool) -> Case:
    """The case with more of the dim; with ``equal``, tensors whose first dim it is repeat one slice."""
    case = other = trial.result.case
    while size > sizes.count(case.sizes[dim]):
        larger = case.with_(sizes=refit(trial.spec, {**case.sizes, dim: size}))
        if cost(trial.spec, larger)[0] <= _ELEMENTS:
            other = larger
            break
        size //= 2
    for name, inner in trial.spec.tensors.items() if equal else ():
        first = inner.shape.terms[:1]
        if name in other.tensors and "expanded" in inner.layouts and first and first[0].names == (dim,):
            other = other.with_tensor(name, layout=Layout("expanded"))
    if other == case:
        raise ImpossibleCase(f"no more of {dim}")
    return other
