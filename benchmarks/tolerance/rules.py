# ruff: noqa: ARG001 - every rule is called with all three
"""The rules in common use, each as ``(candidate, native, oracle) -> accepted``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Rule = Callable[[Tensor, Tensor, Tensor], bool]


def assert_close(candidate: Tensor, native: Tensor, oracle: Tensor) -> bool:
    """torch.testing.assert_close with its default tolerances."""
    try:
        torch.testing.assert_close(candidate, native, equal_nan=True)
    except AssertionError:
        return False
    return True


def _within(size: float) -> Rule:
    def rule(candidate: Tensor, native: Tensor, oracle: Tensor) -> bool:
        return torch.allclose(native, candidate, atol=size, rtol=size, equal_nan=True)

    return rule


def by_dtype(candidate: Tensor, native: Tensor, oracle: Tensor) -> bool:
    """KernelBench today: 1e-4 for float32, 1e-2 below."""
    return _within(1e-4 if native.dtype == torch.float32 else 1e-2)(candidate, native, oracle)


def flash_attention(candidate: Tensor, native: Tensor, oracle: Tensor) -> bool:
    """At most twice the error of the reference, plus the rounding of adding 0.3."""
    exact = oracle.to(native.dtype)
    if not torch.equal(torch.isnan(candidate), torch.isnan(exact)):
        return False
    finite = torch.isfinite(exact)
    if not bool(finite.any()):
        return True
    e, c, n = exact[finite], candidate[finite], native[finite]
    slack = 2 * float((e + 0.3 - 0.3 - e).abs().max())
    return float((c - e).abs().max()) <= 2 * float((n - e).abs().max()) + slack


def _dynamo(size: float) -> Rule:
    from torch._dynamo.utils import same

    def rule(candidate: Tensor, native: Tensor, oracle: Tensor) -> bool:
        try:
            return bool(same(native, candidate, oracle, tol=size, equal_nan=True, log_error=lambda *a, **k: None))
        except (RuntimeError, ValueError):
            return False

    return rule


RULES: dict[str, Rule] = {
    "assert_close": assert_close,
    "1e-2": _within(1e-2),
    "1e-4 / 1e-2": by_dtype,
    "FlashAttention 2x": flash_attention,
    "dynamo 1e-4": _dynamo(1e-4),
    "dynamo 1e-3": _dynamo(1e-3),
}
