"""Running an operation itself on every lane, for operations whose rounding has no rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from pytest_fusion.case.containers import tensors_of
from pytest_fusion.oracle.operand import Operand
from pytest_fusion.oracle.operator_plan import Call
from pytest_fusion.oracle.ops import each
from pytest_fusion.oracle.ops.rule_registry import named
from pytest_fusion.oracle.rounding import GRIDS, D
from pytest_fusion.spec.wording import out_of_memory

# What a rule may raise on unforeseen arguments: the operation then runs lane by lane, and is listed. ATen's
# decomposition of a mean's gradient divides by the number of elements, which may be 0.
REFUSED = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, ArithmeticError)


def run_on_lanes(call: Call, function: Callable[..., Any], pick: Callable[[Operand], Tensor]) -> list[Any] | None:
    """Results of ``function`` on the lanes that ``pick`` takes of a call's operands, each ``(L, *shape)``.

    In float64, else float32, else the native dtypes; None if none works or gives the call's shapes.
    """
    args, kwargs = call.on(pick)
    for dtype in (D, torch.float32, None):
        try:
            run = _in(dtype, function)
            made = results_of(each(run, *_typed(args, dtype, call.args), **_typed(kwargs, dtype, call.kwargs)))
            check_shapes(made, call.natives)
        except REFUSED as error:
            if out_of_memory(error):
                raise
            continue
        return [_widest(m) if isinstance(m, Tensor) else m for m in made]
    return None


def _widest(value: Tensor) -> Tensor:
    return value.to(torch.complex128) if value.is_complex() else value.to(D) if value.is_floating_point() else value


def on_copies(function: Any, names: Sequence[str]) -> Callable[..., tuple[Tensor, ...]]:
    """``function``, which writes the arguments ``names``, as one that returns them instead."""

    def call(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
        function(*args, **kwargs)
        arguments = named(function, args, kwargs)
        return tuple(tensors_of([arguments.get(name) for name in names]))

    return call


def results_of(out: Any) -> list[Any]:
    if isinstance(out, (tuple, list)):
        return [item for part in out for item in (part if isinstance(part, (tuple, list)) else (part,))]
    return [out]


def check_shapes(values: Sequence[Any], natives: Sequence[Any]) -> None:
    for value, native in zip(values, natives, strict=False):
        if isinstance(value, Tensor) and isinstance(native, Tensor) and value.shape[1:] != native.shape:
            raise ValueError(f"lanes have shape {tuple(value.shape[1:])}, the native result {tuple(native.shape)}")


def _typed(tree: Any, dtype: torch.dtype | None, natives: Any) -> Any:
    """Floating lanes in ``dtype``; None: in the dtype of their native counterparts."""
    if dtype is not None:
        return tree_map_only(Tensor, lambda t: t.to(dtype) if t.dtype == D else t, tree)
    return tree_map(lambda v, n: v.to(n.dtype) if isinstance(v, Tensor) and isinstance(n, Tensor) else v, tree, natives)


def _in(dtype: torch.dtype | None, func: Any) -> Any:
    """``func`` with narrower floating dtype arguments lifted to ``dtype``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            wide = dtype.to_complex()
            lifted = {**dict.fromkeys(GRIDS, dtype), torch.complex32: wide, torch.complex64: wide}
            args, kwargs = tree_map_only(torch.dtype, lambda d: lifted.get(d, d), (args, kwargs))
        return func(*args, **kwargs)

    return call
