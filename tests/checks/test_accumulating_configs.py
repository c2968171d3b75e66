"""What a kernel that adds to its output leaves behind while it is tuned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fusion.report.record import TestRecord
from pytest_fusion.spec import values
from pytest_fusion.spec.inputs import tensor
from tests.interpreted import triton_interpreted

triton = triton_interpreted("the plants are judged by what an interpreted access shows")

tl = triton.language
T = torch.Tensor


@triton.jit
def added(x, acc, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(acc, tl.sum(tl.load(x + i, mask=i < n, other=0), 0))


def summing(*, given: bool, **tuning: Any) -> Any:
    """Adds up whole numbers, into a tensor of the caller's or a cleared one of its own."""
    kernel = triton.autotune([triton.Config({"BLOCK": size}) for size in (8, 16)], key=["n"], **tuning)(added)

    def into(x: T, acc: T) -> None:
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, acc, x.numel())

    def fresh(x: T) -> T:
        acc = torch.zeros((), dtype=torch.int32)
        into(x, acc)
        return acc

    return into if given else fresh


def total(x: T) -> T:
    return x.sum(dtype=torch.int32)


def total_into(x: T, acc: T) -> None:
    acc.add_(total(x))


WHOLE = {"x": tensor("n", dtype="int32", values=values.integers(-9, 9), layouts="contiguous")}
ACCUMULATED = {**WHOLE, "acc": tensor("", dtype="int32", values=values.integers(1, 9))}


@pytest.mark.slow
def test_atomics_need_a_reset_and_only_of_their_own_tensor(examine: Any) -> None:
    """Timed runs add up where nothing is reset; what the caller had put there is lost where the wrong thing is."""
    record: TestRecord = examine(summing(given=False, reset_to_zero=["acc"]), total, WHOLE, cases=24)
    assert record.verdict == "pass", record.message
    assert record.checks["configs"]["verdict"] == "pass"
    record = examine(summing(given=False), total, WHOLE)
    assert (record.failed_check, record.cause) == ("configs", "autotune-side-effect"), record.message


@pytest.mark.slow
def test_a_first_call_that_differs_is_the_tunings_fault(examine: Any) -> None:
    """``reset_to_zero`` clears the caller's accumulator in the first call alone: `repeat` would blame chance."""
    fused = summing(given=True, reset_to_zero=["acc"])
    record: TestRecord = examine(fused, total_into, ACCUMULATED, mutates="acc")
    assert (record.failed_check, record.cause) == ("configs", "autotune-side-effect"), record.message
    record = examine(summing(given=True, restore_value=["acc"]), total_into, ACCUMULATED, mutates="acc")
    assert record.verdict == "pass", record.message


@triton.jit
def stored_or_added(x, out, n, BLOCK: tl.constexpr, ADDS: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0)
    if ADDS:
        tl.atomic_add(out + i, value, mask=i < n)
    else:
        tl.store(out + i, value, mask=i < n)


@pytest.mark.parametrize("reset", [False, True])
def test_each_config_that_a_tuning_call_runs_wins_in_some_case(examine: Any, reset: bool) -> None:
    """A split of one stores what others add to: its win hides what the benchmark left behind."""
    configs = [triton.Config({"BLOCK": 32, "ADDS": adds}) for adds in (False, True)]
    kernel = triton.autotune(configs, key=["n"], **({"reset_to_zero": ["out"]} if reset else {}))(stored_or_added)

    def fused(x: T) -> T:
        out = torch.zeros_like(x)
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
        return out

    record: TestRecord = examine(fused, lambda x: x * 1, WHOLE, cases=24)
    wanted = (None, None) if reset else ("configs", "autotune-side-effect")
    assert (record.failed_check, record.cause) == wanted, record.message
