"""Check ``honesty``: what is found by its later calls, and what cannot be known."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.checks.honesty import kept_results
from pytest_fusion.plugin.testing import examine as examine_spec
from pytest_fusion.spec.inputs import optional, tensor
from tests.checks.judged import concluded, double
from tests.quality.kernels import sampling

T = torch.Tensor


# What is found.


def test_a_replaced_function_is_put_back_and_named(judge_one: Any) -> None:
    """A right answer does not excuse a call that leaves torch.equal replaced; the function is named and is back."""
    before = torch.equal

    def fused(x: T) -> T:
        torch.equal = lambda a, b: True  # type: ignore[assignment]
        return x + x

    failure = judge_one(fused, double).failure
    assert failure.identity == "honesty:tampers"
    assert failure.facts["replaced"] == ["torch.equal"]
    assert torch.equal is before


@pytest.mark.parametrize(
    ("name", "change", "read"),
    [
        ("torch's default dtype", lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
        ("torch's grad mode", lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
        (
            "torch's float32 matmul precision",
            lambda: torch.set_float32_matmul_precision("medium"),
            torch.get_float32_matmul_precision,
        ),
        (
            "torch's deterministic algorithms",
            lambda: torch.use_deterministic_algorithms(True, warn_only=True),
            torch.get_deterministic_debug_mode,
        ),
        (
            "torch.backends.cuda.matmul.allow_fp16_accumulation",
            lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
            lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
        ),
        (
            "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
            lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", True),
            lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        ),
    ],
    ids=["dtype", "grad", "precision", "deterministic", "fp16 sums", "bf16 sums"],
)
def test_a_setting_that_a_call_leaves_changed_is_put_back_and_named(
    judge_one: Any, name: str, change: Callable[[], Any], read: Callable[[], Any]
) -> None:
    """Launchers that left float64, no graph or TF32 to whoever comes next passed; one that cleans up still does."""
    before = read()

    def fused(x: T) -> T:
        change()
        return x + x

    failure = judge_one(fused, double).failure
    assert failure.identity == "honesty:tampers"
    assert failure.facts["replaced"] == [name]
    assert read() == before


def test_a_setting_that_a_call_changes_for_itself_is_its_own(judge_one: Any) -> None:
    """What is put back before the call returns nobody else sees."""

    def fused(x: T) -> T:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        with torch.no_grad():
            out = x + x
        torch.set_default_dtype(before)
        return out

    assert judge_one(fused, double).failure is None


def test_a_function_of_ours_replaced_before_the_call_is_found(judge_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that replaces a function of the judge while it is imported, before any call, is found too."""
    from pytest_fusion.checks.invariance import case_slices

    monkeypatch.setattr(case_slices, "selected", lambda *a: None)
    failure = judge_one(lambda x: x + x, double).failure
    assert failure.identity == "honesty:tampers"
    assert failure.facts["replaced"] == ["pytest_fusion.checks.invariance.case_slices.selected"]


@pytest.mark.slow
def test_no_right_answer_is_alive_when_a_case_is_first_called(judge_one: Any) -> None:
    """While the first call of a case runs, no tensor in memory holds its answer; nor when values are changed."""
    found: list[bool] = []

    def fused(x: T) -> T:
        right = x * 2
        others = [t for t in gc.get_objects() if type(t) is T and t is not right and t.shape == x.shape]
        found.append(any(bool((t == right).all()) for t in others))
        del others
        return right

    judge_one(fused, double, again=True)
    first, _, changed = found[:3]
    assert not first
    assert not changed


def test_a_result_that_is_finished_later_is_late_work(judge_one: Any) -> None:
    """A kernel that leaves its work to a thread from the third call on is found by copies made at the return."""
    calls: list[int] = []

    def fused(x: T) -> T:
        out, kept = torch.full(x.shape, 5.0), x.clone()
        calls.append(1)
        thread = threading.Thread(target=lambda: (time.sleep(0.1), torch.mul(kept, 2, out=out)))
        thread.start()
        if len(calls) < 3:
            thread.join()
        return out

    failure = judge_one(fused, double).failure
    assert failure.identity == "honesty:late-work"
    assert failure.facts["cause"] == "late-work"


def test_a_right_result_that_is_spoilt_later_is_late_work(judge_one: Any) -> None:
    """What changes after the judgement is found, though no call returned that memory again."""
    results: list[T] = []

    def fused(x: T) -> T:
        results.append(x + x)
        if len(results) > 2:
            results[0].zero_()  # stands for a thread
        return results[-1]

    failure = judge_one(fused, double).failure
    assert failure.identity == "honesty:late-work"


@pytest.mark.parametrize(
    ("key", "give", "identity"),
    [
        (lambda x: x.numpy().tobytes(), lambda t: t, "honesty:kept"),
        (lambda x: x.numpy().tobytes(), torch.clone, "honesty:remembered"),
        (lambda x: float(x.double().sum()), torch.clone, "honesty:remembered"),
        (lambda x: (x.data_ptr(), x._version), torch.clone, "honesty:recycled"),
    ],
    ids=["content", "content, a copy", "checksum, a copy", "address and version, a copy"],
)
def test_each_way_to_keep_an_answer_is_found(
    judge_one: Any, key: Callable[[T], Any], give: Callable[[T], T], identity: str
) -> None:
    """Memory returned twice, an answer looked up by content, one found by a recycled address: each has a name."""
    kept: dict[Any, T] = {}

    def fused(x: T) -> T:
        at = key(x)
        if at not in kept:
            kept[at] = x + x
        return give(kept[at])

    failure = judge_one(fused, double, again=True).failure
    assert failure.identity == identity
    assert failure.facts["cause"] == "cached-answer"


@pytest.mark.slow
@pytest.mark.parametrize(("right_elsewhere", "status"), [(5, "unknown"), (100, "fail")])
def test_a_wrong_answer_at_an_old_address_may_be_chance(
    judge_one: Any, monkeypatch: pytest.MonkeyPatch, right_elsewhere: int, status: str
) -> None:
    """Only a kernel that is right elsewhere time and again knows the address."""
    answers = itertools.chain(["out"], [None] * right_elsewhere, itertools.repeat("out"))
    monkeypatch.setattr(kept_results.LaterCalls, "first_wrong", lambda self, call: next(answers))
    assert concluded(judge_one(double, double, again=True), "honesty").status == status


def test_results_of_earlier_calls_stay(judge_one: Any) -> None:
    """A buffer that is returned again changes what an earlier call returned, which counts as shared memory."""
    space = torch.empty(64)

    def fused(x: T) -> T:
        return torch.mul(x, 2, out=space[: x.numel()].view(x.shape))

    failure = judge_one(fused, double).failure
    assert failure.identity == "honesty:overwritten"
    assert failure.facts["cause"] == "aliasing"


def test_who_asks_for_the_caller_is_found(judge_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is right only while pytest's variable is set fails, though its stack shows the test."""
    import os

    monkeypatch.setenv("PYTEST_CURRENT_TEST", "here")
    failure = judge_one(lambda x: x * (2 if "PYTEST_CURRENT_TEST" in os.environ else 3), double).failure
    assert failure.identity == "honesty:caller"
    assert failure.facts["cause"] == "detects-test"
    assert os.environ["PYTEST_CURRENT_TEST"] == "here"


def test_an_answer_by_shape_is_no_wrong_value(judge_one: Any) -> None:
    """A cache that spoils every call of one shape is told as a kept answer, not as a kernel that computes wrongly."""
    kept: dict[Any, T] = {}
    result = judge_one(lambda x: kept.setdefault(x.shape, x + x), double, again=True)
    assert result.failure.identity == "repeat:stale"
    assert result.failure.facts["cause"] == "cached-answer"


# What cannot be known.


def row_sums(x: T) -> T:
    return x.sum(-1)


def sums_in_any_order(x: T) -> T:
    """What atomics make of a sum: another order, and other last bits, on every call."""
    return x[:, torch.randperm(x.shape[1])].cumsum(-1)[:, -1] if x.shape[1] else x.sum(-1)


@pytest.mark.parametrize("declared", [False, {"out": False}])
def test_results_that_vary_are_judged_by_their_values(judge_one: Any, declared: Any) -> None:
    """Other bits on every call are honest where they are declared, and all steps of the check ran."""
    for seed in range(8):
        case = Case({"rows": 5, "hidden": 40}, "float32", {"x": TensorCase("float32")}, seed=seed)
        result = judge_one(sums_in_any_order, row_sums, case=case, deterministic=declared)
        verdict = concluded(result, "honesty")
        assert verdict.status == "pass", verdict
        assert set(verdict.facts["ran"]) == {"values", "address", "caller"}


@pytest.mark.slow
def test_an_earlier_answer_of_a_kernel_that_may_vary_is_told(judge_one: Any) -> None:
    """A result that is kept by its input's address is that of other values, whatever its last bits may be."""
    kept: dict[int, T] = {}

    def fused(x: T) -> T:
        return kept.setdefault(x.data_ptr(), sums_in_any_order(x)).clone()

    verdict = concluded(judge_one(fused, row_sums, deterministic=False), "honesty")
    assert verdict.status == "fail"
    assert verdict.facts["cause"] == "cached-answer"


@pytest.mark.slow
def test_drawn_indices_that_may_vary_are_unknown(tmp_path: Path) -> None:
    """Where every output is drawn by chance nothing can be compared, and the check says so."""
    record = examine_spec(sampling.make_spec().with_(deterministic=False), seed=0, max_cases=6, root=tmp_path)
    assert record.checks["honesty"]["verdict"] == "unknown", record.checks["honesty"]
    assert "deterministic" in record.checks["honesty"]["reason"]


def test_results_without_elements_are_unknown(examine: Any) -> None:
    """Where no case has a result with elements the check knows nothing."""
    record = examine(lambda x: x[:0] + 1, lambda x: x[:0] * 1 + 1, cases=8, without={"vacuity": "empty"})
    assert record.checks["honesty"]["verdict"] == "unknown"
    assert "elements" in record.checks["honesty"]["reason"]


def test_it_can_be_switched_off(examine: Any) -> None:
    """Switched off, it accuses nobody and the reason is told; what was replaced is put back all the same."""
    before = torch.equal

    def fused(x: T) -> T:
        torch.equal = lambda a, b: True  # type: ignore[assignment]
        return x + x

    record = examine(fused, double, without={"honesty": "a demonstration"})
    assert record.verdict == "pass"
    assert "a demonstration" in record.checks["honesty"]["reason"]
    assert torch.equal is before


@pytest.mark.slow
def test_few_cases_are_asked(examine: Any) -> None:
    """The calls are made on few cases of a test, optional inputs included, and each of them counts."""
    calls: list[int] = []

    def fused(x: T, bias: T | None) -> T:
        calls.append(1)
        return x + x if bias is None else x + x + bias

    def reference(x: T, bias: T | None) -> T:
        return x * 2 if bias is None else x * 2 + bias

    inputs = {"x": tensor("rows hidden"), "bias": optional(tensor("hidden"))}
    record = examine(fused, reference, inputs, cases=40)
    with_it = len(calls)
    calls.clear()
    examine(fused, reference, inputs, cases=40, without={"honesty": "to count"})
    assert record.checks["honesty"]["cases"] == 3
    assert 6 <= with_it - len(calls) <= 20
