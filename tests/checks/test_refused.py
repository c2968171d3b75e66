"""Hazard `refuses`: an ``assert`` or ``raise`` of the launcher's own, before it launches anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fusion import interpreter
from tests.checks.judged import double

interpreter.enable()
triton = pytest.importorskip("triton")
tl = triton.language
T = torch.Tensor


def hazards(record: Any) -> list[dict[str, Any]]:
    return [found for found in record.findings if found["level"] == "hazard"]


def of_last_stride(x: T) -> T:
    assert x.stride(-1) == 1, "the last dim must be contiguous"
    return x * 2


def by_lookup(x: T) -> T:
    try:
        scale = {0: 2, 1: 2, 2: 2}[x.shape[0]]
    except KeyError:
        raise NotImplementedError("so many rows") from None
    return x * scale


def by_descriptor(x: T) -> T:
    descriptors = pytest.importorskip("triton.tools.tensor_descriptor")
    if x.numel():
        descriptors.TensorDescriptor.from_tensor(x.reshape(-1), [16])
    return x * 2


@pytest.mark.parametrize(
    ("fused", "kind", "text"),
    [
        (by_descriptor, "AssertionError", "base must be 16-byte aligned (in test_refused.py:by_descriptor)"),
        (of_last_stride, "AssertionError", "the last dim must be contiguous"),
        (by_lookup, "NotImplementedError", "so many rows"),
    ],
)
def test_a_refusal_of_the_launchers_own_is_a_hazard_with_its_share(
    fused: Any, kind: str, text: str, examine: Any
) -> None:
    """The cases count as rejected, the others are judged; the keyword that accepts it is printed."""
    record = examine(fused, double, cases=30)
    assert record.verdict == "pass"
    (found,) = hazards(record)
    refused = record.rejected[kind]
    assert (found["code"], found["check"]) == ("refuses", "error")
    assert f"the launcher refuses {refused} of {refused + record.judged} cases" in found["message"]
    assert text in found["message"]
    assert f"rejects={kind}" in found["message"]


def test_a_declared_refusal_is_none(examine: Any) -> None:
    """What ``rejects`` names is counted and no more."""
    record = examine(of_last_stride, double, rejects=AssertionError, cases=30)
    assert (record.verdict, hazards(record)) == ("pass", [])
    assert record.rejected["AssertionError"] > 0


def test_refusing_every_case_is_wrong(examine: Any) -> None:
    """A kernel that refuses everything is not right."""

    def fused(x: T) -> T:
        raise ValueError("never")

    record = examine(fused, double, cases=6)
    assert (record.verdict, record.failed_check) == ("fail", "error")
    assert "a kernel that refuses everything" in record.message


class Halves(torch.autograd.Function):
    """Doubles, and refuses in backward what ``accepts`` is false of."""

    @staticmethod
    def forward(ctx: Any, x: T, accepts: Any) -> T:
        ctx.x, ctx.accepts = x, accepts
        return x * 2

    @staticmethod
    def backward(ctx: Any, *upstream: T) -> tuple[T, None]:
        assert ctx.accepts(ctx.x)
        return upstream[0] * 2, None


class Strict(torch.autograd.Function):
    """Doubles, for upstream gradients that are contiguous."""

    @staticmethod
    def forward(_: Any, x: T) -> T:
        return x * 2

    @staticmethod
    def backward(_: Any, *upstream: T) -> T:
        assert upstream[0].is_contiguous(), "the upstream gradient must be contiguous"
        return upstream[0] * 2


def test_a_refusal_of_backwards_launcher_is_the_same_hazard(examine: Any) -> None:
    """Results are judged, and gradients of the cases that are not refused."""
    record = examine(lambda x: Halves.apply(x, lambda x: x.is_contiguous()), double, cases=30, grad=True)
    assert record.verdict == "pass", record.message
    (found,) = (each for each in hazards(record) if each["code"] == "refuses")
    assert "rejects=AssertionError" in found["message"]


def test_a_backward_that_refuses_every_case_is_wrong(examine: Any) -> None:
    """It has no gradients at all."""
    record = examine(lambda x: Halves.apply(x, lambda x: False), double, cases=12, grad=True)
    assert (record.verdict, record.failed_check) == ("fail", "error")
    assert "backward refuses every case" in record.message


def test_an_assertion_on_the_upstream_gradient_is_a_refusal_too(examine: Any) -> None:
    """Its layout is the caller's, as that of an input is."""

    def fused(x: T) -> T:
        return Strict.apply(x)

    record = examine(fused, double, cases=30, grad=True)
    assert record.verdict == "pass", record.message
    assert "refuses" in [found["code"] for found in hazards(record)]


@triton.jit
def copy_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n, other=0.0) * 2, mask=at < n)


def checked_too_late(x: T) -> T:
    y = torch.empty(x.shape)
    copy_kernel[(max(1, triton.cdiv(x.numel(), 64)),)](x.contiguous(), y, x.numel(), BLOCK=64)
    assert x.stride(-1) == 1
    return y


def of_torch(x: T) -> T:
    return (x * 2).view(x.numel()).view(3, -1)


def mishandled(x: T) -> T:
    try:
        return of_torch(x)
    except RuntimeError as error:
        raise ValueError("cannot be done") from error


def of_python(x: T) -> T:
    return x * (2 + 0 // x.numel())


@pytest.mark.parametrize("fused", [checked_too_late, of_torch, mishandled, of_python])
def test_any_other_exception_is_wrong(fused: Any, examine: Any) -> None:
    """Once a kernel ran, of torch, what follows an error of torch, and what Python raises by itself."""
    record = examine(fused, double, cases=12)
    assert (record.verdict, record.failed_check, record.cause) in (
        ("fail", "error", "raises"),
        ("fail", "error", "zero-size"),
    )


def test_the_tests_own_assertion_is_named(examine: Any) -> None:
    """It is no refusal of a launcher: ``rejects`` would hide it."""

    def test_double(x: T) -> T:
        assert x.shape[0] < 3
        return x * 2

    record = examine(test_double, double, cases=12)
    assert (record.verdict, record.failed_check) == ("fail", "error")
    assert "the test's own assertion failed" in record.message
    assert "rejects=" not in record.message
