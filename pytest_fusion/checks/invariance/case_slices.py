"""Cutting a case along one of its dims: which inputs follow it, and why a dim may have no separate slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.containers import leaves, map_tensors
from pytest_fusion.case.make import needs_of
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.spec.dims import parse_expression
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import DerivedSpec, TensorSpec, unwrap
from pytest_fusion.spec.values import ValueProfile


class Unsliceable(Exception):
    """The dim cannot be cut into independent slices; the message is the reason."""


def tensors(spec: FusionSpec) -> Iterator[tuple[str, TensorSpec]]:
    """The inputs that are described as tensors."""
    for name, declared in spec.inputs.items():
        inner = unwrap(declared)
        if isinstance(inner, TensorSpec):
            yield name, inner


def resized(case: Case, dim: str, size: int) -> Case:
    """The case with another size of one dim and nothing else changed."""
    return case.with_(sizes={**case.sizes, dim: size})


def selected(t: torch.Tensor, axis: int, slices: Sequence[int]) -> torch.Tensor:
    """A tensor of these slices, in this order, for every dtype."""
    index = torch.tensor(list(slices), dtype=torch.int64, device=t.device)
    # torch cannot select float8, nor these.
    if t.element_size() == 1 or t.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return t.view(repeat.WORDS[t.element_size()]).index_select(axis, index).view(t.dtype)
    return t.index_select(axis, index)


def unsliceable(spec: FusionSpec) -> dict[str, str]:
    """Why dims cannot be cut in any case, by name."""
    reasons = {dim: _why_not(spec, dim) for dim in spec.invariant_dims}
    return {dim: f"{dim}: {reason}" for dim, reason in reasons.items() if reason is not None}


def _why_not(spec: FusionSpec, dim: str) -> str | None:
    if dim in spec.batch_names:
        return f"'*{dim}' stands for several dimensions; name a single one"
    bound = spec.bound(dim)
    if bound.max is not None and bound.max < 2:
        return f"there is never more than {bound.max} of it"
    for name in spec.dim_order:
        base = spec.bound(name).multiple_of
        names = parse_expression(base).names if isinstance(base, str) else ()
        if dim in names or (name == dim and names):
            return f"{name} is a multiple of {base}, so that a slice of one belongs to a slice of the other"
    carried = False
    for name, inner in tensors(spec):
        own = [term for term in inner.shape.terms if dim in term.names]
        for term in own:
            if term.text != dim:
                return f"input {name} has the size {term.text}, which cannot be cut into slices of {dim}"
        if len(own) > 1:
            return f"input {name} has it twice, so that its slices belong to pairs"
        if _points_along(inner.values, dim, last=bool(own) and inner.shape.terms[-1] is own[0]):
            return f"the values of input {name} point along it, and would point at other slices"
        carried |= bool(own)
    return None if carried else "no tensor among the inputs has it as an axis"


def _points_along(values: Any, dim: str, *, last: bool) -> bool:
    """Whether values are indices along the dim; ``last``: it is the last axis, that of permutations."""
    if not isinstance(values, ValueProfile):
        return False
    bounds = [parse_expression(bound).names for _, bound in values.params if isinstance(bound, str)]
    return (
        any(dim in names for names in bounds)
        or (values.kind == "permutation" and last)
        or any(_points_along(choice, dim, last=last) for choice in values.choices)
    )


def input_axes(spec: FusionSpec, case: Case, other: Case, logical: Mapping[str, Any], dim: str) -> dict[str, int]:
    """The axis along which each input of the case follows the dim. Raises ``Unsliceable``."""
    # Derived inputs are computed from other slices: the case's own backwards, some twice. Unchanged ones are shared.
    size, count = case.sizes[dim], other.sizes[dim]
    assert isinstance(size, int)
    assert isinstance(count, int)
    slices = [(size - 1 - i) % size for i in range(count)]
    axes = {
        name: axis
        for name, inner in tensors(spec)
        if isinstance(logical.get(name), torch.Tensor) and (axis := inner.shape.axis_of(dim, case.sizes)) is not None
    }
    changed = {dim, *axes}
    given = {name: selected(value, axes[name], slices) if name in axes else value for name, value in logical.items()}
    pending = {
        name: inner
        for name, declared in spec.inputs.items()
        if isinstance(inner := unwrap(declared), DerivedSpec) and logical[name] is not None
    }
    while pending:
        name = next(name for name, inner in pending.items() if not set(inner.needs) & set(pending))
        inner = pending.pop(name)
        if not set(inner.needs) & changed:
            continue
        changed.add(name)
        device = next(logical[each].device for each in axes)
        given[name] = _derive(name, inner, {**other.sizes, **given}, other, device)
        if not _same(given[name], logical[name]):
            axes[name] = _moved_axis(name, logical[name], given[name], slices)
    return axes


def _same(a: Any, b: Any) -> bool:
    """Whether two values of a derived input are equal to the bit."""
    ours, theirs = leaves(a), leaves(b)
    if [leaf.path for leaf in ours] != [leaf.path for leaf in theirs]:
        return False
    for x, y in zip((leaf.value for leaf in ours), (leaf.value for leaf in theirs), strict=True):
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            if x.shape != y.shape or x.dtype != y.dtype or bool(repeat.differing(x, y).any()):
                return False
        elif type(x) is not type(y) or repr(x) != repr(y):
            return False
    return True


def _derive(name: str, inner: DerivedSpec, known: Mapping[str, Any], case: Case, device: torch.device) -> Any:
    """A derived input for other slices. Raises ``Unsliceable`` where there is none."""
    given = needs_of(name, inner, known, case, device)
    given = {need: map_tensors(value, torch.Tensor.clone) for need, value in given.items()}
    try:
        result = inner.function(**given)
    except Exception as error:
        raise Unsliceable(f"the derived input {name} cannot be computed for other slices ({error})") from error
    return map_tensors(result, lambda t: t.detach().to(device).contiguous())


def _moved_axis(name: str, before: Any, after: Any, slices: Sequence[int]) -> int:
    """The axis along which a derived input moved with the slices. Raises ``Unsliceable`` where there is none."""
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.dtype == after.dtype:
        for axis in range(before.dim()):
            if before.shape[axis] == max(slices) + 1 and _same(selected(before, axis, slices), after):
                return axis
    raise Unsliceable(f"the derived input {name} depends on all slices, so that none can be taken alone")
