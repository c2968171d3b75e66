"""Launch arguments as the tensors a GPU kernel receives.

A Python float arrives as float32, an integer as the narrowest of i32, i64, u64 that holds it, a bool as i1; an
annotation such as ``tl.float64`` or ``"i64"`` overrules. Upstream leaves floats as Python numbers, so that
``eps.to(tl.float32)`` fails, and keeps integers of 2**31 and more in uint32, which then wraps at 32 bits.
An integer 1 is specialised to a constant on the device; as a tensor it computes the same values (``launcher`` takes its
``.to`` away).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array, numpy_dtype
from pytest_fusion.interpreter.memory.regions import Regions

_MOST_CACHED = 4096
_INTEGER_WIDTH = re.compile(r"([iu])(\d+)")


class Arguments:
    """Converts launch arguments; built once per process."""

    def __init__(self, tl: Any, handle: Any, upstream: Any) -> None:
        self._tl = tl
        self._handle = handle
        self._upstream = upstream
        self._types: dict[str, tuple[Any, np.dtype[Any]]] = {}
        # A launch has two dozen scalars, most of them strides, sizes and widths that come again.
        self._numbers: dict[tuple[str, int], tuple[Any, Array]] = {}
        self._pointers: dict[Any, Any] = {}

    def convert(self, value: Any, annotation: str = "") -> Any:
        """``value`` as a kernel sees it; ``annotation`` is the canonical type name (``"fp32"``) or empty."""
        if isinstance(value, bool | np.bool_):
            return self._scalar(bool(value), annotation or "u1")
        if isinstance(value, int | np.integer):
            return self._scalar(int(value), annotation or _narrowest(int(value)))
        if isinstance(value, float | np.floating):
            return self._scalar(float(value), annotation or "fp32")
        if isinstance(value, tuple):
            converted = [self.convert(v) for v in value]
            return type(value)(*converted) if hasattr(value, "_fields") else type(value)(converted)
        if not hasattr(value, "data_ptr"):
            return self._upstream(value)
        dtype = value.dtype
        pointer = self._pointers.get(dtype)
        if pointer is None:
            made = self._upstream(value)
            self._pointers[dtype] = made.type
            return made
        return self._tl.tensor(self._handle(np.array([value.data_ptr()], np.uint64), pointer), pointer)

    def launched(self, name: str, value: Any, annotation: str, regions: Regions) -> Any:
        """``convert(value)``, with its memory registered in ``regions`` and as the origin of the pointer."""
        if isinstance(value, tuple):
            parts = [self.launched(f"{name}[{i}]", v, "", regions) for i, v in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        converted = self.convert(value, annotation)
        descriptor = hasattr(value, "block_shape")
        tensor = value.base if descriptor else value
        if not hasattr(tensor, "data_ptr"):
            return converted
        view = regions.add(name, tensor)
        if view is not None:
            handle = converted.handle.base if descriptor else converted.handle
            handle.attr["origin"] = frozenset({view})
            # torch reports the address of an empty tensor as 0; a finding needs its place in the storage.
            handle.data = np.array([view.region.address + view.start], np.uint64)
        return converted

    def _scalar(self, value: bool | float, name: str) -> Any:
        if type(value) is not int:
            type_, data = self._number(value, name)
        elif (found := self._numbers.get((name, value))) is not None:
            type_, data = found
        else:
            type_, data = self._number(value, name)
            if len(self._numbers) < _MOST_CACHED:
                self._numbers[name, value] = type_, data
        return self._tl.tensor(self._handle(data, type_), type_)

    def _number(self, value: bool | float, name: str) -> tuple[Any, Array]:
        known = self._types.get(name)
        if known is None:
            type_ = self._tl.str_to_ty(name, None)
            known = self._types[name] = (type_, numpy_dtype(type_))
        type_, dtype = known
        if dtype.kind in "iu":
            value = int(value) & ((1 << (8 * dtype.itemsize)) - 1)
            data = np.array([value], np.dtype(f"u{dtype.itemsize}")).view(dtype)
        else:
            # A float beyond float32 becomes infinity, as in the C of the launcher, and without a warning.
            with np.errstate(all="ignore"):
                data = np.array([value], np.float64).astype(dtype)
        return type_, data


def _narrowest(value: int) -> str:
    if -(2**31) <= value < 2**31:
        return "i32"
    if -(2**63) <= value < 2**63:
        return "i64"
    if value < 2**64:
        return "u64"
    raise OverflowError(f"the launch argument {value} does not fit in a 64-bit integer")


def annotation_names(function: Any, normalize: Any) -> tuple[frozenset[str], dict[str, str]]:
    """The parameters of a kernel that are constexpr, and the scalar type names of those annotated with one.

    ``normalize`` is Triton's ``_normalize_ty``.
    """
    constexprs, types = set(), {}
    for name, annotation in function.__annotations__.items():
        text = normalize(annotation) if annotation is not None else ""
        text = text if isinstance(text, str) else ""
        if "constexpr" in text:
            constexprs.add(name)
        elif text in {"fp16", "bf16", "fp32", "fp64"} or (_INTEGER_WIDTH.fullmatch(text) and text != "i1"):
            types[name] = text
        elif text in {"i1", "u1"}:
            types[name] = "u1"
    return frozenset(constexprs), types
