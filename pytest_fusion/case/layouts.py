"""The geometry of a layout: strides, offset and storage size for a shape, in elements."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pytest_fusion.case import strided
from pytest_fusion.case.case_model import Layout
from pytest_fusion.spec.inputs import LAYOUTS

# Gaps that are no multiple of any vector width, so that ignoring a stride reads another element.
ROW_PAD = 3
SLICE_BEFORE = 1
SLICE_AFTER = 2
ODD_STRIDE = 7
# The first element offset that does not fit a signed 32-bit integer.
FAR = 1 << 31
# Rows of real tensors begin at multiples of 16, on which Triton specialises; kernels may reject others.
_PITCH = 16


@dataclass(frozen=True, slots=True)
class Geometry:
    """``strides`` and ``offset`` in elements of a storage of ``storage`` elements; ``expanded`` axes have stride 0."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: int
    expanded: tuple[int, ...] = ()


def variants(kind: str, ndim: int) -> int:
    """The number of variants of this layout in ``ndim`` dimensions."""
    match kind:
        case "contiguous":
            return 2 if ndim else 1
        case "padded":
            return 2 if ndim >= 2 else 1 if ndim else 0
        case "transposed":
            return 0 if ndim < 2 else 1 if ndim == 2 else 2
        case "step":
            return 1 if ndim else 0
        case "unflattenable":
            return 2 if ndim >= 3 else 0
        case "expanded":
            return min(ndim, 2)
        case "large":
            return min(ndim, 3)
        case "pitched":
            return 1 << 16 if ndim >= 2 else 0
    return int(len(strided.parse(kind) or ()) == ndim > 0)


def choices(allowed: tuple[str, ...], ndim: int) -> list[tuple[str, int]]:
    """The (kind, variant) pairs that may be drawn for ``ndim`` dimensions, plainest first; never empty."""
    # The order is never the spec's: a shrinker with "transposed" plainer than "contiguous" would not terminate.
    kinds = sorted(allowed, key=LAYOUTS.index)
    pairs = [(kind, v) for kind in kinds if kind != "offset" for v in range(variants(kind, ndim))]
    return pairs or [("contiguous", 0)]


def _dense(shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> list[int]:
    """Dense strides with the axes in ``order`` (outermost first); sizes of 0 count as 1, as in torch."""
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order if order is not None else range(len(shape))):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return strides


def far_axis(shape: tuple[int, ...], variant: int) -> int | None:
    """The far axis of layout ``large``; ``None`` where it has fewer than two elements.

    Variant 0: the first axis of more than one element; 1: the last axis; 2: the last but one.
    """
    long = [axis for axis, size in enumerate(shape) if size > 1]
    axis = (long[0] if long else -1) if variant == 0 else len(shape) - variant
    return axis if axis in long and 0 not in shape else None


def _far_stride(shape: tuple[int, ...], axis: int) -> int:
    """A stride below ``FAR``, as 32-bit arguments are, that puts the last slice of an axis past ``FAR``."""
    stride = FAR // (shape[axis] - 1) // _PITCH * _PITCH + _PITCH
    within = math.prod(shape) // shape[axis]
    return max(min(stride, FAR - _PITCH), -(-within // _PITCH) * _PITCH)


def goes_far(shape: tuple[int, ...], layout: Layout) -> bool:
    """Whether some element is ``FAR`` or more elements after the first."""
    if layout.kind != "large":
        return False
    plan = geometry(shape, layout)
    return plan.storage - plan.offset > FAR


def of_fewer(shape: tuple[int, ...], layout: Layout, axis: int, size: int) -> Layout:
    """The layout of a tensor cut to ``size`` slices along ``axis``."""
    # Permuted layouts keep their strides, as views do: one row of a transposed tensor would be dense by itself, and a
    # compiler that knows a stride of 1 adds in another order. Otherwise only a size that becomes 1 matters: its stride
    # must not become odd.
    if size >= shape[axis]:
        return layout
    if layout.kind in ("transposed", "unflattenable"):
        return Layout(strided.stated(geometry(shape, layout).strides), layout.offset)
    if layout.kind != "contiguous" or layout.variant == 0 or size != 1:
        return layout
    new = (*shape[:axis], size, *shape[axis + 1 :])
    strides = list(geometry(new, layout).strides)
    strides[axis] = _dense(new)[axis]
    return Layout(strided.stated(strides), layout.offset)


def geometry(shape: tuple[int, ...], layout: Layout) -> Geometry:
    """The places of the elements.

    Kinds: ``contiguous`` (variant 1: odd strides on size-1 axes), ``padded`` (rows inside a wider buffer; variant 1: an
    interior slice of a tensor larger in every axis), ``transposed`` (variant 1: all axes reversed), ``step`` (last axis
    strided by 2), ``unflattenable`` (leading axes permuted; variant 1: a gap between matrices), ``expanded`` (stride 0
    on the first axis; variant 1: on the last), ``large`` (one axis strided past ``FAR``, see :func:`far_axis`; the
    others dense), ``pitched`` (rows that begin at multiples of ``variant`` elements, with gaps between), and the
    strides themselves of recorded tensors (``strided``). A layout that the shape does not admit is contiguous.
    """
    ndim = len(shape)
    offset = layout.offset
    expanded: tuple[int, ...] = ()
    kind = layout.kind if layout.variant < variants(layout.kind, ndim) else "contiguous"
    axes = tuple(range(ndim))
    trailing = 0  # elements of the wider buffer after the tensor's last one
    match kind, layout.variant:
        case "padded", 0 if ndim == 1:
            strides = _dense(shape)
            offset += SLICE_BEFORE
            trailing = SLICE_AFTER
        case "padded", 0:
            trailing = ROW_PAD
            strides = _dense((*shape[:-1], shape[-1] + ROW_PAD))
        case "padded", _:
            strides = _dense(tuple(size + SLICE_BEFORE + SLICE_AFTER for size in shape))
            offset += SLICE_BEFORE * sum(strides)
            trailing = SLICE_AFTER * sum(strides)
        case "transposed", 0:
            strides = _dense(shape, (*axes[:-2], axes[-1], axes[-2]))
        case "transposed", _:
            strides = _dense(shape, axes[::-1])
        case "step", _:
            strides = [2 * stride for stride in _dense(shape)]
        case "unflattenable", 0:
            strides = _dense(shape, (*axes[1:-1], axes[0], axes[-1]))
        case "unflattenable", _:
            strides = _dense((*shape[:-2], shape[-2] + 1, shape[-1]))
        case "large", variant if (far := far_axis(shape, variant)) is not None:
            strides = _dense(tuple(1 if i == far else size for i, size in enumerate(shape)))
            strides[far] = _far_stride(shape, far)
        case "pitched", pitch:
            wide = (*shape[:-1], (shape[-1] // max(pitch, 1) + 1) * max(pitch, 1))
            strides = _dense(wide)
            trailing = wide[-1] - shape[-1]
        case "expanded", variant:
            axis = 0 if variant == 0 else ndim - 1
            expanded = (axis,)
            strides = _dense(tuple(1 if i == axis else size for i, size in enumerate(shape)))
            strides[axis] = 0
        case stated, _ if (own := strided.parse(stated)) is not None and strided.admits(shape, own):
            strides, expanded = list(own), strided.expanded(shape, own)
        case _:
            strides = _dense(shape)
            if layout.variant == 1:
                strides = [s if shape[i] != 1 else ODD_STRIDE * (i + 1) for i, s in enumerate(strides)]
    last = sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))
    reach = 0 if 0 in shape else last + 1
    return Geometry(shape, tuple(strides), offset, offset + reach + trailing, expanded)
