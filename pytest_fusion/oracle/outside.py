"""Values that leave torch's operators for numpy or Python, where lanes cannot follow."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from pytest_fusion.oracle.lane_store import Lanes
from pytest_fusion.oracle.rounding import GRIDS, D, Noise

_WAYS_OUT = ("numpy", "tolist", "__dlpack__")
# Results are off by at most 16 units of float32 (float64: of its own): roundings of numpy and Python, and other orders.
# This is a guess, which the test's notes report.
_UNITS = 16


@contextmanager
def noting(taken: list[str], mode: TorchDispatchMode) -> Iterator[None]:
    """Add to ``taken`` how a floating tensor's values left torch under ``mode``, other than within an operator."""
    # Functions from ``torch.compile`` run eagerly: Dynamo would trace the lanes' own code with the reference's.
    with ExitStack() as stack:
        for name in _WAYS_OUT:
            stack.enter_context(patch.object(Tensor, name, _noting(getattr(Tensor, name), name, taken, mode)))
        # No reference can be compiled before Dynamo is imported, which takes 2 s.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _noting(upstream: Callable[..., Any], name: str, taken: list[str], mode: TorchDispatchMode) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def note(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point() and tensor.numel() and _get_current_dispatch_mode() is mode:
            taken.append(name)
        return upstream(tensor, *args, **kwargs)

    return note


def priced(noise: Noise, lanes: Lanes, native: Tensor, known: bool) -> Lanes:
    """A result of a reference whose numbers left torch; it is already rounded unless its lanes are ``known``."""
    if native.dtype not in GRIDS or not native.numel():
        return lanes
    size = _UNITS * 2.0 ** -GRIDS[D if native.dtype == D else torch.float32].bits
    if not known:
        size = max(size, 2.0 ** (1 - GRIDS[native.dtype].bits))
    noisy = noise.relative(lanes.raw, size)
    # A number that many elements share, such as a norm, is off equally in all.
    noisy[1:] *= 1 + size * noise.uniform((1,) * native.dim(), native.device)
    return Lanes(noisy, noisy)
