"""What calls are told apart by, exactly and in classes few enough to count by; and what their kernels are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pytest_fusion.case.containers import tensors_of

# More of a call's tensors would make more classes than can be counted by.
MOST_TENSORS = 4


def signature_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Shapes, dtypes and devices of the tensors, values of what is discrete, types of the rest. Hashable."""
    return tuple(_part(value) for value in args), tuple((name, _part(kwargs[name])) for name in sorted(kwargs))


def _part(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, tuple | list):
        return tuple(_part(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((key, _part(item)) for key, item in value.items())
    return (type(value), value) if value is None or isinstance(value, bool | int | str) else type(value)


def bucket_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """``"float16[2^10,2^12] float16[2^12]"``: dtypes, and sizes rounded up to a power of two; at most four tensors."""
    parts = []
    for tensor in tensors_of([args, kwargs]):
        sizes = ",".join("0" if size == 0 else f"2^{(size - 1).bit_length()}" for size in tensor.shape)
        parts.append(f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}]")
        if len(parts) == MOST_TENSORS:
            break
    return " ".join(parts) or "no tensor"


def named(function: Callable[..., Any]) -> str:
    """Where a kernel is defined, as ``"package.module:function"``, for those who read logs."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}:{name}"
