"""Reading inputs from jaxtyping annotations, recognised by their attributes so that jaxtyping is never imported."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

from pytest_fusion.errors import SpecError
from pytest_fusion.spec.dtypes import FLOATING, INTEGER, KNOWN
from pytest_fusion.spec.inputs import InputSpec, OptionalSpec, tensor


def _is_array(annotation: Any) -> bool:
    return hasattr(annotation, "dim_str") and hasattr(annotation, "dtypes")


def _dtype_of(annotation: Any) -> Any:
    """The dtype argument of ``tensor``: ``None`` when every floating dtype is meant (``Float``, ``Shaped``)."""
    names = annotation.dtypes
    if not isinstance(names, list | tuple):
        return None  # jaxtyping's marker for "any dtype"
    known = [name for name in names if isinstance(name, str) and name in KNOWN]
    if "bool" in names or "bool_" in names:
        return "bool"
    if not known:
        raise SpecError(f"the annotation {annotation!r} names no dtype that torch has: {list(names)}")
    floating = [name for name in known if name in FLOATING]
    if len(floating) > 1:
        return None
    if not floating and len(known) > 1:
        # `Int` means any width; indices are int64 in PyTorch, int32 in most kernels.
        return [n for n in ("int64", "int32") if n in known] or [n for n in known if n in INTEGER] or known
    return known


def inputs_from_annotations(function: Callable[..., Any]) -> dict[str, InputSpec]:
    """Input specs of the parameters annotated like ``x: Float[Tensor, "rows hidden"]`` (or that ``| None``).

    Other parameters are not inputs. Raises ``SpecError`` when the annotations cannot be evaluated.
    """
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # noqa: BLE001 - evaluating an annotation runs anything
        if not any("[" in str(a) for a in getattr(function, "__annotations__", {}).values()):
            return {}
        raise SpecError(f"cannot read the annotations of {function.__name__}: {error}") from None
    inputs: dict[str, InputSpec] = {}
    for name in inspect.signature(function).parameters:
        annotation: Any = hints.get(name)
        if _is_array(annotation):
            inputs[name] = tensor(annotation.dim_str, dtype=_dtype_of(annotation))
        else:
            members = [part for part in typing.get_args(annotation) if _is_array(part)]
            if len(members) == 1 and type(None) in typing.get_args(annotation):
                inputs[name] = OptionalSpec(tensor(members[0].dim_str, dtype=_dtype_of(members[0])))
    return inputs
