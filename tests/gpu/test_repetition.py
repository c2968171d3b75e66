"""Repeated calls and gradients on a GPU: a busy device, other addresses, atomics, kernels of a training library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from benchmarks.checks.kernels import specs  # noqa: E402 - after the skip
from pytest_fusion import FusionSpec, dim, tensor  # noqa: E402
from pytest_fusion.case.model import Case, TensorCase  # noqa: E402
from pytest_fusion.run.company import competing  # noqa: E402
from pytest_fusion.run.memory.decoys import Decoys  # noqa: E402
from pytest_fusion.testing import examine  # noqa: E402
from pytest_fusion.verdict.judge import Bench, CaseResult, judge_case  # noqa: E402

T = torch.Tensor


@triton.jit
def column_sums(x, out, columns, stride, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    tl.atomic_add(out + at, tl.load(x + row * stride + at, mask=at < columns), mask=at < columns)


def by_atomics(x: T) -> T:
    out = torch.zeros(x.shape[1], device=x.device)
    x = x.contiguous()
    column_sums[(x.shape[0],)](x, out, x.shape[1], x.stride(0), BLOCK=triton.next_power_of_2(x.shape[1]))
    return out


class Bias(torch.autograd.Function):
    """``x + b`` whose bias gradient is added up by atomics."""

    @staticmethod
    def forward(_: Any, x: T, b: T) -> T:
        return x + b

    @staticmethod
    def backward(_: Any, *gradients: T) -> Any:
        return gradients[0], by_atomics(gradients[0])


def add_bias(x: T, b: T) -> T:
    result: T = Bias.apply(x, b)
    return result


def judged(fused: Callable[..., Any], reference: Callable[..., Any], *, deep: bool, **keywords: Any) -> CaseResult:
    """One case of 3,000 rows, whose atomics have no steady order."""
    inputs: Mapping[str, Any] = {"x": tensor("rows columns")}
    spec = FusionSpec(fused=fused, reference=reference, inputs=inputs, dtypes="float32", **keywords)
    case = Case({"rows": 3000, "columns": 64}, "float32", {"x": TensorCase("float32")}, seed=1)
    return judge_case(Bench(spec, torch.device("cuda", 0), programs=1 << 30, deep=deep), case, again=True)


@pytest.mark.parametrize("deep", [False, True])
def test_sums_by_atomics_fail_unless_declared(deep: bool) -> None:
    """The order of 3,000 additions is not the same in any two calls."""
    failure = judged(by_atomics, lambda x: x.sum(0), deep=deep).failure
    assert failure is not None
    assert failure.identity == "repeat:out"
    assert failure.evidence["most_ulp"] >= 1
    assert judged(by_atomics, lambda x: x.sum(0), deep=deep, deterministic={"out": False}).failure is None


@pytest.mark.parametrize("deep", [False, True])
def test_an_honest_kernel_passes_on_a_busy_device(deep: bool) -> None:
    """Other work, other addresses and dirty memory change no bit of a steady kernel."""
    result = judged(lambda x: torch.softmax(x, -1), lambda x: torch.softmax(x, -1), deep=deep)
    assert result.failure is None, result.failure
    assert {v.status for v in result.verdicts if v.check == "repeat"} == {"pass"}


@pytest.mark.parametrize("name", ["rms_norm", "softmax"])
def test_kernels_with_a_backward_pass(name: str) -> None:
    """Forward and backward of a training library's kernels, through every default check."""
    record = examine(specs()[name], device="cuda", max_cases=60)
    assert record.verdict == "pass", record.message
    assert record.checks["gradients"]["verdict"] == "pass"


def test_a_gradient_by_atomics_fails_unless_declared() -> None:
    """The bias gradient varies, and may be declared by the input's name."""
    keywords: dict[str, Any] = {
        "fused": add_bias,
        "reference": lambda x, b: x + b,
        "inputs": {"x": tensor("rows columns"), "b": tensor("columns")},
        "dims": {"rows": dim(min=2000, max=4000), "columns": dim(min=1, max=64)},
        "dtypes": "float32",
        "grad": True,
    }
    record = examine(FusionSpec(**keywords), device="cuda", max_cases=40)
    assert (record.failed_check, record.cause) == ("repeat", "nondeterministic"), record.message
    assert '"db": False' in record.message
    record = examine(FusionSpec(**keywords, deterministic={"db": False}), device="cuda", max_cases=40)
    assert record.verdict == "pass", record.message


def test_company_and_decoys_leave_nothing_behind() -> None:
    """Memory that they took is free again, and what ran beside them is right."""
    device = torch.device("cuda", 0)
    x = torch.arange(1000, device=device, dtype=torch.float32)
    with competing(device):
        pass  # libraries and their workspaces are loaded once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    decoys = Decoys(device, [1 << 20, 4096], seed=1)
    for _ in range(6):
        decoys.shuffle()
    with competing(device):
        assert torch.equal(x * 2, x + x)
    assert torch.cuda.memory_allocated() > before, "the decoys that are held"
    del decoys
    assert torch.cuda.memory_allocated() == before
