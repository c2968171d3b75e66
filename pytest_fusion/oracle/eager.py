"""What a reference loses as eager PyTorch in the dtype of its 16-bit inputs: every result is rounded to that.

Upcasts (``.float()``, ``dtype=float32``) do not count, and sums inside an operation stay in float32. Softmax, norms and
attention are rounded as their formulas, whether or not the reference writes these out. Numbers too large for 16 bits
keep float32's range, since an overflow is no standard for a kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_fusion.case.containers import tensors_of
from pytest_fusion.interpreter.bridge.aten import schema
from pytest_fusion.interpreter.bridge.dispatch import OperatorMode
from pytest_fusion.oracle.operator_plan import decompositions
from pytest_fusion.oracle.outside import noting
from pytest_fusion.oracle.rounding import GRIDS, NARROW, D, quantum, significand
from pytest_fusion.run.precision import full_precision

# One sample rounds to nearest, which may be exact by luck; the others round at random.
SAMPLES = 8
_WIDE = frozenset({torch.float32, D})
# Operations rounded as their formulas. Row statistics (mean, sum) stay in float32, as in torch's own kernels.
_FORMULAS = frozenset(
    "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data silu silu_backward native_layer_norm "
    "native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm _fused_rms_norm "
    "native_batch_norm_backward _fused_rms_norm_backward".split()
)


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

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ARG002
        """The results of the operator, rounded in place."""
        given = [t for t in tensors_of((args, kwargs)) if t.is_floating_point() or t.is_complex()]
        dtype = self._promoted(given)
        bits = GRIDS[dtype].bits if dtype in GRIDS and dtype not in _WIDE else 0
        facts = schema(func)
        body = decompositions().get(func) if bits and facts.name in _FORMULAS else None
        if body is not None and self._whole is None:
            self._whole = given[0].shape
            try:
                with self:
                    out = body(*args, **kwargs)
            finally:
                self._whole = None
        else:
            out = func(*args, **kwargs)
        statistics = body is not None and not facts.name.endswith(("backward", "backward_data"))
        # Within a formula a conversion arrives as a view, though it may not be one.
        known = {_key(t) for t in given} if facts.view else ()
        for place, result in enumerate(t for t in tensors_of(out) if t.dtype in _WIDE and _key(t) not in known):
            self._note(result, dtype)
            if bits and not (statistics and place) and self._whole in (None, result.shape):
                self._round(result, bits)
        return out

    def stored(self, result: Tensor) -> Tensor:
        """A result in float64; random samples of 16-bit results held in a wider dtype are off by up to half a unit."""
        # Another formula's result need not be a 16-bit number.
        values, dtype = result.to(D, copy=True), self._of(result)
        if self._generator is not None and result.dtype in _WIDE and dtype in NARROW:
            half = quantum(values, dtype).mul_(0.5)
            values += torch.empty_like(values).uniform_(-1, 1, generator=self._generator) * half
        return values

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

    def _round(self, result: Tensor, bits: int) -> None:
        values = result.detach()
        result.data.copy_(torch.where(values.isfinite(), significand(values, bits, self._generator), values))


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
