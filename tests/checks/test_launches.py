"""Check `launches`: calls that take more kernels than they may are found, with the kernels that are too many."""

from __future__ import annotations

import sys
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.checks.launches import launches
from pytest_fusion.checks.launches.extra_launches import surplus
from pytest_fusion.interpreter.launch import Launch, announce
from pytest_fusion.run.measure.launches import Counts, Uncounted, Work
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.placing import place
from pytest_fusion.spec.inputs import tensor

T = torch.Tensor


def doubled(x: T) -> T:
    return 2 * x


def kernel(x: T, factor: float = 2, name: str = "scale_kernel") -> T:
    """Stands for a Triton kernel in any layout: one launch, and a result in fresh memory."""
    if x.numel():
        announce(Launch(name, (1, 1, 1)))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out.numpy()[...] = x.detach().numpy() * factor
    return out


def strided() -> Case:
    layout = Layout("transposed")
    return Case({"rows": 5, "hidden": 7}, "float32", {"x": TensorCase("float32", layout)}, seed=1)


def failure(result: Any) -> Any:
    (found,) = [verdict for verdict in result.verdicts if verdict.failed]
    return found


def told(result: Any) -> Any:
    return next((verdict for verdict in result.verdicts if verdict.check == "launches"), None)


def test_one_kernel_passes(examine: Any) -> None:
    """An operator is one kernel in every case, and the record says how that is known."""
    record = examine(kernel, doubled, max_launches=1)
    check = record.checks["launches"]
    assert (record.verdict, check["verdict"]) == ("pass", "pass"), record.message
    assert check["reason"].startswith("at most 1 kernel(s) a call, modelled")


def test_two_kernels_are_one_too_many(examine: Any) -> None:
    """A kernel split in two fails, and the message has both with their lines, what was allowed and what helps."""
    record = examine(lambda x: kernel(kernel(x, name="first"), 1), doubled, max_launches=1)
    assert (record.verdict, record.failed_check, record.cause) == ("fail", "launches", "extra-launch"), record.message
    assert record.checks["launches"]["names"] == [["first", 1], ["scale_kernel", 1]]
    for words in ("launches 2 kernels", "max_launches=1 allows 1", "first at test_launches.py:", "or allow it"):
        assert words in record.message


def test_a_copy_of_strided_inputs_is_found(judge_one: Any) -> None:
    """A hidden `.contiguous()` copies strided inputs only, which the same case with contiguous ones shows."""
    keywords = {"max_launches": 1, "case": strided()}
    found = failure(judge_one(lambda x: kernel(x.contiguous()), doubled, again=True, **keywords))
    assert found.facts["surplus"] == [["aten::clone", 1]]
    assert found.facts["because"].startswith("with contiguous inputs it launches 1")
    assert "pass strides to the kernel" in found.reason

    plain = judge_one(lambda x: kernel(x.contiguous()), doubled, again=True, max_launches=1)
    assert told(plain).status == "pass"


def test_a_conversion_is_found(judge_one: Any) -> None:
    """A cast in the launcher is a kernel, named as such."""
    found = failure(judge_one(lambda x: kernel(x.double()).float(), doubled, max_launches=1))
    assert dict(found.facts["names"]) == {"aten::_to_copy": 2, "scale_kernel": 1}
    assert "float32 to float64" in found.reason
    assert "convert inside the kernel" in found.reason


def test_a_fill_before_an_accumulation_is_found(judge_one: Any) -> None:
    """`torch.zeros` on the inputs' device is a kernel."""

    def fused(x: T) -> T:
        out = torch.zeros(x.shape, device=x.device)
        out.numpy()[...] += kernel(x).numpy()
        return out

    found = failure(judge_one(fused, doubled, max_launches=1))
    assert dict(found.facts["names"]) == {"aten::zeros": 1, "scale_kernel": 1}


def test_what_a_gpu_does_without_a_kernel_passes(judge_one: Any) -> None:
    """Views, fresh memory, copies of bytes and arithmetic on the host cost no launch."""

    def fused(x: T) -> T:
        lengths = torch.cumsum(torch.tensor([1, 2, 3]), 0)
        total = torch.zeros(3).add_(1).sum()
        twin = x.clone().t().t().view(-1)[: x.numel()].view_as(x)
        return kernel(twin, 2 * int(lengths[0]) * int(total) / 3)

    verdict = told(judge_one(fused, doubled, max_launches=1, again=True))
    assert (verdict.status, verdict.facts["kernels"], verdict.facts["memcpy"]) == ("pass", 1, 1)


def test_work_in_place_is_counted_on_restored_inputs(examine: Any, judge_one: Any) -> None:
    """A declared mutation is counted as any other call, and what it clobbers is put back before each."""
    seen: list[float] = []

    def in_place(x: T) -> None:
        x.numpy()[...] = kernel(x).numpy()

    def fused(x: T) -> None:
        seen.append(float(x.flatten()[0]) if x.numel() else 0.0)
        in_place(x)

    off = {"honesty": "its calls have other values"}
    result = judge_one(fused, lambda x: x.mul_(2), mutates="x", max_launches=0, without=off)
    assert failure(result).facts["names"] == [["scale_kernel", 1]]
    assert len(set(seen)) == 1
    honest = examine(in_place, lambda x: x.mul_(2), mutates="x", max_launches=1)
    assert honest.checks["launches"]["verdict"] == "pass", honest.message


def test_chance_is_no_matter(examine: Any) -> None:
    """Kernels that vary by declaration are counted as others are."""
    record = examine(kernel, doubled, deterministic=False, max_launches=1)
    assert record.checks["launches"]["verdict"] == "pass", record.message


def test_without_a_bound_it_is_unknown(examine: Any) -> None:
    """The check is opt-in and says how."""
    check = examine(kernel, doubled).checks["launches"]
    assert (check["verdict"], "max_launches=" in check["reason"]) == ("unknown", True)


def test_a_path_for_the_cpu_is_unknown(examine: Any) -> None:
    """Where no case launches a kernel, torch's operators may be what runs on a CPU alone: no pass and no failure."""
    for fused in (lambda x: x * 2, lambda x: x.abs().mul(2).mul(x.sign())):
        check = examine(fused, doubled, max_launches=1).checks["launches"]
        assert (check["verdict"], "no Triton kernel was launched" in check["reason"]) == ("unknown", True)


def test_a_case_that_falls_back_fails(judge_one: Any, examine: Any) -> None:
    """Operators of torch in place of the kernel fail where other cases do launch it."""

    def fused(x: T) -> T:
        return kernel(x) if x.is_contiguous() else x.abs().mul(2).mul(x.sign())

    record = examine(fused, doubled, max_launches=1, cases=24)
    assert (record.failed_check, record.cause) == ("launches", "extra-launch"), record.message
    assert "aten::sign" in record.message


@torch.library.custom_op("fusion_launches::sum_of_two", mutates_args=(), device_types="cuda")
def sum_of_two(x: T) -> T:
    raise NotImplementedError


@sum_of_two.register_kernel("cpu")
def _(x: T) -> T:
    return x.add(x).mul(1)


@torch.library.custom_op("fusion_launches::nothing_seen", mutates_args=())
def nothing_seen(x: T) -> T:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    np.multiply(x.numpy(), np.float32(2), out=out.numpy())
    return out


@pytest.mark.parametrize("operator", [sum_of_two, nothing_seen], ids=lambda operator: operator._name)
def test_an_operator_that_does_other_things_here_is_unknown(examine: Any, operator: Any) -> None:
    """Code for the CPU alone, or code that launches nothing, is no evidence of what a GPU would launch."""
    check = examine(lambda x: operator(kernel(x, 1)), doubled, max_launches=1).checks["launches"]
    assert (check["verdict"], "operator fusion_launches::" in check["reason"]) == ("unknown", True), check


def test_nothing_judged_is_unknown(examine: Any) -> None:
    """Cases without elements launch nothing, and say nothing."""
    inputs = {"x": tensor("rows 0")}
    check = examine(kernel, doubled, inputs, max_launches=1, without={"vacuity": "no elements"}).checks["launches"]
    assert (check["verdict"], check["reason"]) == ("unknown", launches._NO_LAUNCH)


def test_a_first_call_that_fills_a_cache_passes(examine: Any) -> None:
    """Only what a second call launches too counts."""
    kept: dict[str, T] = {}

    def fused(x: T) -> T:
        if "two" not in kept:
            kept["two"] = torch.ones((), device=x.device).add(x.new_ones(()))
        return kernel(x, float(kept["two"]))

    record = examine(fused, doubled, max_launches=1)
    assert record.checks["launches"]["verdict"] == "pass", record.message


class Gpu:
    """Stands for the device: what a count gives, one answer after the other, and what was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), []

    def count(self, *_: Any, **keywords: Any) -> Any:
        self.asked.append(keywords)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, judge_one: Any) -> Any:
    """One case as a GPU would count it; ``before`` cases have been counted already."""

    def judge(gpu: Gpu, *, before: int = 0, **keywords: Any) -> Any:
        def count(self: Any, case: Case) -> Any:
            self.state.counted += before
            placed = place(self.trial.logical, case, torch.device("cpu"), FILLS[0])
            return self.measure(placed), []

        monkeypatch.setattr(launches.launches, "count", gpu.count)
        monkeypatch.setattr(launches._Counting, "count", count)
        without = {"honesty": "these tests replace functions of the package"}
        return told(judge_one(kernel, doubled, again=True, max_launches=1, without=without, **keywords))

    return judge


def counts(kernels: int, *, agreed: bool | None = True, doubts: tuple[str, ...] = ()) -> Counts:
    return Counts(kernels, 0, 0, (("k", kernels),) if kernels else (), "graph", agreed, doubts)


def test_measured_counts_are_compared(on_gpu: Any) -> None:
    """What two methods agree on fails beyond the bound and passes within it."""
    assert on_gpu(Gpu(counts(1))).status == "pass"
    found = on_gpu(Gpu(counts(2)))
    assert (found.status, found.facts["agreed"]) == ("fail", True)
    assert "a captured CUDA graph, the same by the profiler" in found.reason


def test_too_many_without_a_cross_check_are_checked_again(on_gpu: Any) -> None:
    """A graph alone accuses nobody before the profiler was asked."""
    gpu = Gpu(counts(2, agreed=None), Uncounted("a captured graph has 2 and the profiler saw 3"))
    assert on_gpu(gpu, before=1).status == "unknown"
    assert [asked.get("cross_check", True) for asked in gpu.asked] == [False, True]


def test_methods_that_disagree_are_unknown(on_gpu: Any) -> None:
    """Without one number there is no verdict."""
    verdict = on_gpu(Gpu(Uncounted("a captured graph has 1 kernel(s) and the profiler saw 2")))
    assert (verdict.status, verdict.reason) == ("unknown", "a captured graph has 1 kernel(s) and the profiler saw 2")


def test_a_call_that_waits_is_not_captured(on_gpu: Any) -> None:
    """Where `syncs=True` says that a capture would fail, the profiler alone is asked."""
    gpu = Gpu(counts(1))
    on_gpu(gpu, syncs=True)
    assert gpu.asked[0]["capture"] is False


def test_the_surplus_is_what_other_cases_do_not_take() -> None:
    """Compared with the call that took fewest; without one torch's own kernels come first."""
    many = Counts(3, 0, 0, (("aten::sum", 1), ("split_k", 1), ("store", 1)), "modelled")
    work = [Work("kernel", name) for name, _ in many.names]
    found = surplus(many, work, plain=None, fewest=Counter(store=1))
    assert dict(found.names) == {"aten::sum": 1, "split_k": 1}
    found = surplus(many, work, plain=None, fewest=None)
    assert (dict(found.names), found.because) == ({"aten::sum": 1}, "1 of them is torch's own: aten::sum")
    own = Counts(2, 0, 0, (("a", 1), ("b", 1)), "graph", True)
    found = surplus(own, [], plain=None, fewest=None)
    assert (dict(found.names), found.advice) == (
        {"a": 1, "b": 1},
        "make one kernel of them, or allow it: max_launches=2",
    )


def test_compiled_code_is_unknown_on_the_cpu_lane(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor makes for the CPU says nothing of a GPU, neither in favour nor against."""
    module = ModuleType("compiled")
    module.cpp_fused_mul_0 = lambda x: x.mul(1)  # type: ignore[attr-defined]
    cache = SimpleNamespace(PyCodeCache=SimpleNamespace(modules=[module]))
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", cache)  # type: ignore[arg-type]
    check = examine(lambda x: module.cpp_fused_mul_0(kernel(x)), doubled, max_launches=1).checks["launches"]
    assert (check["verdict"], "a GPU gets others" in check["reason"]) == ("unknown", True), check
