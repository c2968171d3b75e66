"""Repeated calls and gradients on a GPU: a busy device, other addresses, atomics, kernels of a training library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
globaltimer = pytest.importorskip("triton.language.extra.cuda").globaltimer

from benchmarks.checks.kernels import specs  # noqa: E402 - after the skip
from pytest_fusion import FusionSpec, dim, tensor  # noqa: E402
from pytest_fusion.case.case_model import Case, TensorCase  # noqa: E402
from pytest_fusion.checks.case_judge import judge_case  # noqa: E402
from pytest_fusion.checks.context import CaseResult, Context  # noqa: E402
from pytest_fusion.checks.repeat.repetition import Decoys  # noqa: E402
from pytest_fusion.plugin.testing import examine  # noqa: E402
from pytest_fusion.run.stress.competing_kernels import competing, crowded  # noqa: E402

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
    return judge_case(Context(spec, torch.device("cuda", 0), programs=1 << 30, deep=deep), case, again=True)


@pytest.mark.parametrize("deep", [False, True])
def test_sums_by_atomics_fail_unless_declared(deep: bool) -> None:
    """The order of 3,000 additions is not the same in any two calls."""
    failure = judged(by_atomics, lambda x: x.sum(0), deep=deep).failure
    assert failure is not None
    assert failure.identity == "repeat:out"
    assert failure.facts["most_ulp"] >= 1
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


@triton.jit
def wait(NANOSECONDS: tl.constexpr):
    begin = globaltimer()
    now = begin
    while now - begin < NANOSECONDS:
        now = globaltimer()


@triton.jit
def ticketed_sum(x, parts, counter, out, n, last, BLOCK: tl.constexpr, MOST: tl.constexpr):
    """Whoever draws the ticket ``last`` adds up the parts, 20 us later: by then all that run beside it have theirs."""
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    wait(10_000)
    tl.store(parts + program, tl.sum(tl.load(x + at, mask=at < n, other=0.0)))
    if tl.atomic_add(counter, 1, sem="acq_rel") == last:
        wait(20_000)
        which = tl.arange(0, MOST)
        tl.store(out, tl.sum(tl.load(parts + which, mask=which < tl.num_programs(0), other=0.0, volatile=True)))


def by_tickets(x: T, *, early: int) -> T:
    x = x.contiguous().flatten()
    programs = triton.cdiv(x.numel(), 128)
    parts, counter = torch.empty(programs, device=x.device), torch.zeros(1, dtype=torch.int32, device=x.device)
    out = torch.empty((), device=x.device)
    last = max(programs - 1 - early, 0)
    ticketed_sum[(programs,)](x, parts, counter, out, x.numel(), last, BLOCK=128, MOST=triton.next_power_of_2(programs))
    return out


def judged_with_little_room(early: int) -> CaseResult:
    inputs: Mapping[str, Any] = {"x": tensor("rows columns")}
    spec = FusionSpec(
        fused=lambda x: by_tickets(x, early=early), reference=lambda x: x.sum(), inputs=inputs, dtypes="float32"
    )
    case = Case({"rows": 80, "columns": 128}, "float32", {"x": TensorCase("float32")}, seed=1)
    return judge_case(Context(spec, torch.device("cuda", 0), programs=1 << 30), case, again=True)


def test_a_program_that_is_not_the_last_one_is_caught_where_few_run_at_a_time() -> None:
    """Alone 80 programs run at once, and who takes itself for the last one finds all parts."""
    failure = judged_with_little_room(early=60).failure
    assert failure is not None
    assert failure.check == "repeat", failure
    assert failure.facts["order"] == "crowded"
    assert "few at a time" in failure.reason


def test_the_last_one_of_few_at_a_time_is_right() -> None:
    """The same kernel with the right ticket, and the order that was asked is told."""
    result = judged_with_little_room(early=0)
    assert result.failure is None, result.failure
    assert [v.facts["orders"] for v in result.verdicts if "orders" in v.facts] == [["crowded"]]


@triton.jit
def count_together(now_running, most, NANOSECONDS: tl.constexpr):
    tl.atomic_max(most, tl.atomic_add(now_running, 1) + 1)
    wait(NANOSECONDS)
    tl.atomic_add(now_running, -1)


def test_a_crowded_device_has_little_room_and_is_free_afterwards() -> None:
    """Of 256 programs some 128 and more run at once alone, and 16 at the most beside others."""
    device = torch.device("cuda", 0)
    alone, beside = torch.zeros((2, 2, 4), dtype=torch.int32, device=device)
    count_together[(256,)](alone[0], alone[1], NANOSECONDS=20_000)
    torch.cuda.synchronize()
    with crowded(device):
        count_together[(256,)](beside[0], beside[1], NANOSECONDS=20_000)
        torch.cuda.current_stream().synchronize()
    assert int(alone[1, 0]) >= 64
    assert int(beside[1, 0]) <= 16
    before = torch.cuda.memory_allocated()
    with crowded(device):
        pass
    assert torch.cuda.memory_allocated() == before


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
