"""A lower bound of the launches of one torch operator on a GPU.

The number fails tests, so it must be a lower bound: an operator counts as one kernel, however many it launches, and as
none if torch has a way without one. These ways come from ATen's CUDA sources (``Copy.cu``, ``TensorShape.cpp`` and
``Shape.cu`` of torch 2.11 and 2.13).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import torch

from pytest_fusion.case.containers import tensors_of
from pytest_fusion.interpreter.bridge.dispatch import schema, shares_memory, written_by
from pytest_fusion.run.refusals import around_kernel

# Along more dimensions torch also concatenates without this kernel (CAT_ARRAY_MAX_INPUT_DIMS).
_CAT_DIMS = 4

# Allocations and views; no work.
_IDLE: Final = frozenset(
    "set_ resize_ resize_as_ record_stream is_pinned pin_memory _pin_memory is_same_size "
    "_has_same_storage_numel sym_size sym_stride sym_numel sym_storage_offset _assert_async _assert_scalar "
    "_functional_assert_async _functional_sym_constrain_range sym_constrain_range detach_ _version".split()
)
# Rounding an integer copies it.
_ROUNDINGS: Final = frozenset("ceil floor trunc round ceil_ floor_ trunc_ round_".split())
# These may reduce to copies of dense memory.
_SCATTERED: Final = frozenset(
    "slice_scatter select_scatter diagonal_scatter as_strided_scatter split_copy split_with_sizes_copy unbind_copy "
    "_foreach_copy _foreach_copy_ _copy_from _copy_from_and_resize _chunk_cat roll _weight_norm_interface".split()
)


@dataclass(frozen=True, slots=True)
class Work:
    """The device work of an operator or an interpreted launch. ``detail`` and ``where`` are for people."""

    kind: Literal["kernel", "memcpy"]
    name: str
    detail: str = ""
    where: str = ""


def work_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[Work]:
    """The least work of ``func`` (an ``aten`` overload) on a GPU for these arguments."""
    name = func.overloadpacket.__name__
    given, made = tensors_of((args, kwargs)), tensors_of(result)
    if name in _IDLE or schema(func).empty or _looks(func):
        return []
    if name == "_local_scalar_dense":
        return [_work("memcpy", name)]
    if name == "equal":
        # It reads no values of empty tensors, different shapes or shared memory.
        a, b = given[:2]
        return [_work("kernel", name)] if a.shape == b.shape and a.numel() and not shares_memory(a, [b]) else []
    written = written_by(func, args, kwargs) or made
    if not any(t.numel() for t in written):
        return []
    if name in _SCATTERED:
        return [_work("memcpy", name)]
    if name in ("cat", "stack"):
        return _joined(name, given, made)
    source = _source(func, args, given, made)
    if source is not None:
        return [_copied(name, source, written[0])]
    if any(t.numel() == 0 for t in given):
        return []
    if not _always(func) and all(t.numel() <= 1 for t in written):
        return []
    if not schema(func).writes and all(shares_memory(t, given) for t in made):
        return []
    return [_work("kernel", name, ", ".join(f"{tuple(t.shape)} {_word(t.dtype)}" for t in (given or made)[:2]))]


@lru_cache(maxsize=4096)
def _looks(func: Any) -> bool:
    """Whether it only makes a view or answers a question about a tensor."""
    if schema(func).view or torch.Tag.inplace_view in func.tags:
        return True
    returns = [str(value.type) for value in func._schema.returns]
    no_tensor = not any("Tensor" in kind for kind in returns) and not schema(func).writes
    return no_tensor and func.overloadpacket.__name__ not in ("_local_scalar_dense", "equal")


@lru_cache(maxsize=4096)
def _always(func: Any) -> bool:
    """Whether it launches a kernel also for one element. Other operators often have shortcuts for one element."""
    tags = [getattr(torch.Tag, name, None) for name in ("pointwise", "reduction")]
    name = func.overloadpacket.__name__
    return any(tag in func.tags for tag in tags if tag is not None) or name in _FILLS


_FILLS: Final = frozenset(
    "zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full zero_ fill_ fill arange mm addmm bmm "
    "sum mean amax amin".split()
)


def _source(func: Any, args: Sequence[Any], given: list[torch.Tensor], made: list[torch.Tensor]) -> torch.Tensor | None:
    """The tensor that the operator only copies; ``None`` if it computes."""
    name = schema(func).name
    if name == "copy_" or (name in ("fill_", "fill", "copy") and len(given) > 1):
        return given[1]
    if schema(func).copies and given:
        return given[0] if made and made[0].shape == given[0].shape else made[0] if made else None
    if name in _ROUNDINGS and given and not given[0].is_floating_point():
        return given[0]
    same_size = bool(given) and bool(made) and given[0].numel() == made[0].numel()
    if name in ("repeat", "constant_pad_nd") and same_size:
        return given[0].reshape(made[0].shape) if given[0].is_contiguous() else made[0]
    if name == "flip" and given and all(given[0].shape[dim] <= 1 for dim in args[1]):
        return given[0]
    plain = name == "pow" and len(args) > 1 and isinstance(args[1], (int, float)) and args[1] == 1
    return given[0] if plain and given else None


def _copied(name: str, source: torch.Tensor, target: torch.Tensor) -> Work:
    if source.dtype != target.dtype:
        return _work("kernel", name, f"{_word(source.dtype)} to {_word(target.dtype)}")
    if same_order(source, target) and (source.is_conj(), source.is_neg()) == (target.is_conj(), target.is_neg()):
        return _work("memcpy", name)
    strides = f"strides {tuple(source.stride())} to {tuple(target.stride())}"
    return _work("kernel", name, f"shape {tuple(target.shape)}, {strides}")


def same_order(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a copy between both is one of bytes: dense and in one order, or one element; not if one is broadcast."""
    if b.numel() <= 1:
        return True
    if a.shape != b.shape:
        return False
    sized = [(x, y, n) for x, y, n in zip(a.stride(), b.stride(), a.shape, strict=True) if n > 1]
    reached = 1
    for x, y, size in sorted(sized):
        if x != reached or y != reached:
            return False
        reached *= size
    return True


def _joined(name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> list[Work]:
    """One kernel for several parts of one dtype; else a copy each, by copy engines for dense parts."""
    parts = [t for t in given if t.numel()]
    dtypes = {t.dtype for t in parts}
    if len(parts) > 1 and len(dtypes) == 1 and made[0].dim() <= _CAT_DIMS:
        return [_work("kernel", name, f"{len(parts)} tensors into {tuple(made[0].shape)}")]
    into = made[0].dtype
    casts = [f"{_word(t.dtype)} to {_word(into)}" if t.dtype != into else "" for t in parts]
    return [_work("kernel" if cast else "memcpy", name, cast) for cast in casts]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _work(kind: Literal["kernel", "memcpy"], name: str, detail: str = "") -> Work:
    return Work(kind, f"aten::{name}", detail)


def caller() -> str:
    """``file.py:line`` of the innermost frame outside torch, Triton and this stage; empty if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not around_kernel(file):
            return f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
