"""What a reference loses as eager PyTorch in the dtype of its 16-bit inputs: every result is rounded to that.

Upcasts (``.float()``, ``dtype=float32``) do not count, and sums stay in float32 inside of an operation. Softmax, norms
and attention count as their formulas written out, so that it makes no difference whether the reference does that. A
number that is too large for 16 bits keeps float32's range, since what overflows is no yardstick; one that is small for
float16 loses digits (``x * sigmoid(x)`` of -17 is 0 there). Products are the exception, of matrices or of two different
tensors: whoever stores their result, or its terms, in float16 has infinity there. Squares are none, which norms add up
in float32.

A value that is computed twice is rounded twice: fused losses compute the logit of the label apart from those that are
added up (cut-cross-entropy, from terms that are rounded), where a loss of next to nothing is the difference of both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from pytest_fusion.case.containers import tensors_of
from pytest_fusion.interpreter.bridge.dispatch import OperatorMode, schema
from pytest_fusion.oracle.operator_plan import decompositions
from pytest_fusion.oracle.outside import noting
from pytest_fusion.oracle.rounding import GRIDS, NARROW, D, Grid, quantum, significand
from pytest_fusion.run.precision import full_precision

# One sample rounds to nearest, which may be exact by luck; the others round at random.
SAMPLES = 8
_WIDE = frozenset({torch.float32, D})
# Operations that count as their formula. A norm's row statistics (mean, sum) stay in float32, as in torch's kernels.
_FORMULAS = frozenset(
    "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data silu silu_backward native_layer_norm "
    "native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm _fused_rms_norm "
    "native_batch_norm_backward _fused_rms_norm_backward".split()
)

# Of these the sum over a row is rounded as well: it cancels against one term, and a formula written out rounds it.
_ROUNDED_SUMS = frozenset({"_softmax_backward_data", "_log_softmax_backward_data"})
_PRODUCTS = frozenset("mm bmm addmm baddbmm mv addmv dot convolution".split())
# The largest term of a product as the root of the sum of such powers, within a third: cut-cross-entropy multiplies in
# float16, and adds up in float32.
_POWER = 16
# An odd number whose product spreads the low bits of an integer over all.
_MIXER = -7046029254386353131


class Eager(OperatorMode):
    """Rounds results of 16-bit numbers, whatever dtype holds them.

    A tensor's eager dtype is its own, or the 16 bits of what it was computed from. One made from no tensor (``zeros``,
    ``arange``) has none, and takes that of its operands.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self._generator = generator
        # Within a formula, the shape of what is rounded.
        self._whole: torch.Size | None = None
        self._dtypes: dict[int, tuple[StorageWeakRef, torch.dtype | None]] = {}
        # The call of each product, which holds what it read; and its storage.
        self._products: dict[int, tuple[Callable[[], Tensor], StorageWeakRef]] = {}

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ARG002
        """The results of the operator, rounded in place."""
        given = [t for t in tensors_of((args, kwargs)) if t.is_floating_point() or t.is_complex()]
        dtype = self._promoted(given)
        grid = None if dtype is None or dtype in _WIDE else GRIDS.get(dtype)
        facts = schema(func)
        body = decompositions().get(func) if grid and facts.name in _FORMULAS else None
        if body is not None and self._whole is None:
            self._whole = None if facts.name in _ROUNDED_SUMS else given[0].shape
            try:
                with self:
                    out = body(*args, **kwargs)
            finally:
                self._whole = None
        else:
            out = func(*args, **kwargs)
        if facts.name == "_log_softmax" and _key(given[0]) in self._products:
            out.add_(self._half_units(self._products[_key(given[0])][0]().view_as(out), dtype))
        statistics = body is not None and not facts.name.endswith(("backward", "backward_data"))
        # Within a formula a conversion arrives as a view, though it may not be one.
        known = {_key(t) for t in given} if facts.view else ()
        for place, result in enumerate(t for t in tensors_of(out) if t.dtype in _WIDE and _key(t) not in known):
            self._note(result, dtype)
            if grid and not (statistics and place) and self._whole in (None, result.shape):
                multiplied = facts.name == "mul" and len({_key(t) for t in given}) > 1
                self._round(result, grid, grid.largest if multiplied or facts.name in _PRODUCTS else math.inf)
        if facts.name in _PRODUCTS:
            size = functools.partial(_size, func, args, kwargs)
            if grid and dtype == torch.float16 and _at_most(given) > grid.largest:
                # Infinity of either sign, or NaN of two.
                out.masked_fill_(_size(func, args, kwargs, power=_POWER) > grid.largest, math.nan)
            self._products[_key(out)] = size, StorageWeakRef(out.untyped_storage())  # type: ignore[no-untyped-call]
        return out

    def stored(self, result: Tensor) -> Tensor:
        """A result in float64; random samples of 16-bit results held in a wider dtype are off by up to half a unit."""
        # Another formula's result need not be a 16-bit number.
        values, dtype = result.to(D, copy=True), self._of(result)
        return values + self._half_units(values, dtype) if result.dtype in _WIDE else values

    def _half_units(self, values: Tensor, dtype: torch.dtype | None) -> Tensor:
        """At most half a unit of each value in a 16-bit ``dtype``, of either sign; zeros in the first sample."""
        if self._generator is None or dtype is None or dtype not in NARROW:
            return torch.zeros_like(values)
        # Equal numbers are rounded alike: the mean of equal rows is off by as much as one of them.
        exact = values.detach().to(D)
        bits = exact.view(torch.int64) ^ torch.randint(1 << 62, (), generator=self._generator, device=values.device)
        for shift in (32, 29):
            bits = (bits ^ (bits >> shift)) * _MIXER
        return (quantum(exact, dtype) * (bits >> 11) * 2.0**-53).to(values.dtype)

    def _promoted(self, operands: Sequence[Tensor]) -> torch.dtype | None:
        """The dtype of the eager operation; tensors take precedence over numbers (tensors without dims)."""
        dtypes = [(t.dim() > 0, found) for t in operands if (found := self._of(t)) is not None]
        strong = [dtype for large, dtype in dtypes if large] or [dtype for _, dtype in dtypes]
        return functools.reduce(torch.promote_types, strong) if strong else None

    def _of(self, tensor: Tensor) -> torch.dtype | None:
        if tensor.itemsize == 1:
            return None
        if tensor.dtype not in _WIDE:
            return tensor.dtype
        found = self._dtypes.get(_key(tensor))
        if found is not None:
            return found[1]
        return tensor.dtype if tensor.dim() else None

    def _note(self, result: Tensor, dtype: torch.dtype | None) -> None:
        # The reference to a storage prevents reuse of its address.
        self._dtypes[_key(result)] = (StorageWeakRef(result.untyped_storage()), dtype)  # type: ignore[no-untyped-call]

    def _round(self, result: Tensor, grid: Grid, largest: float) -> None:
        values = result.detach()
        # Of float16 alone: bfloat16 has float32's range.
        step = grid.step if grid.step < grid.tiny else 0.0
        rounded = torch.where(values.isfinite(), significand(values, grid.bits, self._generator, step=step), values)
        result.data.copy_(torch.where(rounded.abs() > largest, rounded * math.inf, rounded))


def _size(product: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, power: int = 2) -> Tensor:
    """How large the terms of each sum of a product are together: the root of the sum of their squares; their largest,
    nearly, with a large ``power``, which is even."""
    powers: tuple[Any, Any] = tree_map_only(Tensor, lambda t: t.to(D).pow(power), (args, kwargs))
    return torch.as_tensor(product(*powers[0], **powers[1])).pow(1 / power)


def _at_most(operands: Sequence[Tensor]) -> float:
    """What no term of a product exceeds: its two operands with the largest numbers, multiplied."""
    return math.prod(sorted(float(t.detach().abs().amax()) for t in operands if t.numel())[-2:])


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def run_eager(call: Callable[[], Sequence[Tensor]], *, seed: int) -> list[Tensor]:
    """The results of ``call`` in eager 16 bits, each (samples, *shape) and float64. Raises what ``call`` raises."""
    found = [_once(call, None)]
    device = next((t.device for t in found[0]), None)
    generator = torch.Generator(device).manual_seed(seed >> 1)
    found += [_once(call, generator) for _ in range(1, SAMPLES)]
    return [torch.stack(list(samples)) for samples in zip(*found, strict=True)]


def _once(call: Callable[[], Sequence[Tensor]], generator: torch.Generator | None) -> list[Tensor]:
    mode = Eager(generator)
    # torch's own formula of attention, whose probabilities are rounded like any other result.
    attention = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with full_precision(), attention, noting([], mode), mode:
        results = list(call())
    return [mode.stored(t.detach()) if t.is_floating_point() else t.detach().clone() for t in results]
