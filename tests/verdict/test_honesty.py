"""Check ``honesty``: what is found by its later calls, and what honest kernels may do."""

from __future__ import annotations

import gc
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from pytest_fusion import values
from pytest_fusion.case.model import Case, Layout, TensorCase
from pytest_fusion.run import genuine
from pytest_fusion.spec.inputs import optional, tensor
from pytest_fusion.testing import examine as examine_spec
from pytest_fusion.verdict import later
from pytest_fusion.verdict.model import Verdict
from tests.quality.kernels import sampling

T = torch.Tensor


@pytest.fixture(autouse=True)
def _nothing_found_before() -> Any:
    """What another test's kernel replaced is no finding here."""
    genuine.take()


def double(x: T) -> T:
    return x * 2


def honesty(result: Any) -> Verdict:
    (verdict,) = [v for v in result.verdicts if v.check == "honesty"]
    return verdict


# What an honest kernel may do.


def view_of_its_own(x: T) -> T:
    buffer = torch.empty(2 * x.numel() + 3)
    out = buffer[3 : 3 + x.numel()].view(x.shape)
    return torch.mul(x, 2, out=out)


def workspace_that_stays() -> Callable[[T], T]:
    space = torch.zeros(1 << 16)

    def fused(x: T) -> T:
        used = space[: x.numel()].view(x.shape)
        used.copy_(x)
        used += x
        return used.clone()

    return fused


def packed_once(*, weakly: bool) -> Callable[[T, T], T]:
    """Weights in another layout, made once for a tensor and a version of it."""
    weak: dict[int, tuple[Any, int, T]] = {}

    def fused(x: T, w: T) -> T:
        known = weak.get(id(w))
        alive = known is not None and (known[0]() if weakly else known[0]) is w
        if known is None or not alive or known[1] != w._version:
            known = weak[id(w)] = (weakref.ref(w) if weakly else w, w._version, w.T.contiguous())
        return x @ known[2]

    return fused


def table_by_shape() -> Callable[[T], tuple[T, T]]:
    tables: dict[int, T] = {}

    def fused(x: T) -> tuple[T, T]:
        table = tables.setdefault(x.shape[-1], torch.arange(x.shape[-1], dtype=torch.float32) / 7)
        return x * table, table

    return fused


def table_reference(x: T) -> tuple[T, T]:
    table = torch.arange(x.shape[-1], dtype=torch.float32) / 7
    return x * table, table


class Pool:
    """A worker that idles between calls; each call waits for its result."""

    def __init__(self) -> None:
        self.jobs: queue.Queue[Any] = queue.Queue()
        self.worker: threading.Thread | None = None

    def work(self) -> None:
        while True:
            job, done = self.jobs.get()
            job()
            done.set()

    def __call__(self, x: T) -> T:
        if self.worker is None:
            self.worker = threading.Thread(target=self.work, daemon=True)
            self.worker.start()
        out, done = torch.empty(x.shape), threading.Event()
        self.jobs.put((lambda: out.copy_(x * 2), done))
        done.wait()
        return out


def compiles(x: T) -> T:
    result: T = torch.compile(lambda t: t + t, backend="eager")(x)
    return result


def patches_and_restores(x: T) -> T:
    kept, time.perf_counter = time.perf_counter, lambda: 0.0
    try:
        return x + x
    finally:
        time.perf_counter = kept


def with_an_attribute(x: T) -> T:
    out = x + x
    out.quantization_scale = 0.5  # type: ignore[attr-defined]
    return out


def under_inference_mode(x: T) -> T:
    with torch.inference_mode():
        return x + x


def expanded(x: T) -> T:
    return (x + x).sum(0, keepdim=True).expand(x.shape)


def differentiates(x: T) -> T:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad((leaf * leaf).sum(), leaf)
    return gradient


def on_a_thread_that_is_joined(x: T) -> T:
    out = torch.empty(x.shape)
    thread = threading.Thread(target=lambda: torch.add(x, x, out=out))
    thread.start()
    thread.join()
    return out


HONEST: dict[str, Callable[[], Callable[..., Any]]] = {
    "a plain one": lambda: lambda x: x + x,
    "a view of a buffer of its own": lambda: view_of_its_own,
    "a workspace that is not returned": workspace_that_stays,
    "a pool of threads": Pool,
    "a thread that is joined": lambda: on_a_thread_that_is_joined,
    "torch.compile": lambda: compiles,
    "a patch that is undone": lambda: patches_and_restores,
    "an attribute on the result": lambda: with_an_attribute,
    "inference mode": lambda: under_inference_mode,
    "autograd inside": lambda: differentiates,
    "a parameter": lambda: lambda x: torch.nn.Parameter(x + x, requires_grad=False),
    "a result with garbage in cycles": lambda: _with_cycles,
}


def _with_cycles(x: T) -> T:
    out = x + x
    cycle: list[Any] = [x, out]
    cycle.append(cycle)
    return out


@pytest.mark.parametrize("name", list(HONEST))
def test_an_honest_kernel_passes(judge_one: Any, name: str) -> None:
    """What an honest kernel keeps, starts or leaves as garbage is no finding, on three cases one after the other."""
    fused = HONEST[name]()
    for seed in (1, 2, 3):
        case = Case({"rows": 5, "hidden": 7}, "float32", {"x": TensorCase("float32", Layout("padded"))}, seed=seed)
        result = judge_one(fused, double, case=case, again=True)
        assert result.failure is None, result.failure
        assert honesty(result).status == "pass"
        assert "values" in honesty(result).evidence["ran"]
        assert "caller" in honesty(result).evidence["ran"]


def packed_by_content() -> Callable[[T, T], T]:
    packed: dict[Any, T] = {}

    def fused(x: T, w: T) -> T:
        at = w.shape, float(w.double().sum())
        if at not in packed:
            packed[at] = w.T.contiguous() + 0
        return x @ packed[at]

    return fused


def test_weights_packed_by_content_are_honest(examine: Any) -> None:
    """Less work on weights seen before is no finding where the answer itself is computed."""
    finite = {"values": values.normal()}
    inputs = {"x": tensor("rows hidden", **finite), "w": tensor("cols hidden", **finite)}
    record = examine(packed_by_content(), lambda x, w: x @ w.T, inputs)
    assert record.verdict == "pass", record.message
    assert record.checks["honesty"]["verdict"] == "pass"


@pytest.mark.parametrize("weakly", [True, False])
def test_weights_packed_once_are_honest(examine: Any, weakly: bool) -> None:
    """A cache keyed by a tensor that it holds, strongly or weakly, and its version is right and passes."""
    inputs = {"x": tensor("rows hidden"), "w": tensor("cols hidden")}
    record = examine(packed_once(weakly=weakly), lambda x, w: x @ w.T, inputs)
    assert record.verdict == "pass", record.message
    assert record.checks["honesty"]["verdict"] == "pass"


def test_an_address_whose_tensor_is_kept_alive_is_honest(judge_one: Any) -> None:
    """No other tensor can come to lie where one is that the cache holds, so none is put there."""
    kept: dict[Any, tuple[T, T]] = {}

    def fused(x: T) -> T:
        at = x.data_ptr(), x._version
        if at not in kept:
            kept[at] = x, x + x
        return kept[at][1].clone()

    result = judge_one(fused, double, again=True)
    assert result.failure is None
    assert "alive" in honesty(result).evidence["not_run"]["address"]


def test_a_table_that_depends_on_sizes_may_be_shared(examine: Any) -> None:
    """An output that is the same for all values may be one memory for all calls."""
    record = examine(table_by_shape(), table_reference)
    assert record.verdict == "pass", record.message
    assert record.checks["honesty"]["verdict"] == "pass"


def test_a_kernel_without_tensors_may_remember(examine: Any) -> None:
    """A table made from numbers alone is the same whenever it is asked for."""
    tables: dict[int, T] = {}

    def fused(n: int) -> T:
        return tables.setdefault(n, torch.arange(n) / 7)

    record = examine(fused, lambda n: torch.arange(n) / 7, {"n": st.integers(1, 5)})
    assert record.verdict == "pass", record.message


def test_kernels_in_place_and_with_views_pass(judge_one: Any) -> None:
    """An input that is written as declared, and a result that is a view as the reference's is, are no findings."""
    in_place = judge_one(lambda x: x.mul_(2), lambda x: x.mul_(2), mutates="x", again=True)
    assert honesty(in_place).status == "pass"
    view = judge_one(lambda x: x.view(-1), lambda x: x.reshape(-1), again=True)
    assert honesty(view).status == "pass"
    spread = judge_one(expanded, lambda x: (x * 2).sum(0, keepdim=True).expand(x.shape), again=True)
    assert honesty(spread).status == "pass"


def test_a_subclass_that_the_reference_returns_too_passes(judge_one: Any) -> None:
    """A tensor subclass is a finding only where the reference returns another type."""

    class Quantised(T):
        pass

    def quantised(x: T) -> T:
        return (x * 2).as_subclass(Quantised)

    assert judge_one(quantised, quantised).failure is None
    assert judge_one(quantised, double).failure.identity == "structure:out:type"


def test_what_depends_on_the_thread_is_not_the_caller(judge_one: Any) -> None:
    """A kernel whose bits depend on what holds for one thread, as autocast does, is not accused."""
    mark = threading.local()
    mark.scale = 2.0

    def fused(x: T) -> T:
        return x * getattr(mark, "scale", 3.0)

    verdict = honesty(judge_one(fused, double, again=True))
    assert verdict.status == "pass"
    assert "another thread" in verdict.evidence["not_run"]["caller"]


def test_a_patch_that_stood_before_is_nobodys(judge_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer frozen by a fixture is neither a finding nor put back."""
    frozen = lambda: 7.0  # noqa: E731
    monkeypatch.setattr(time, "perf_counter", frozen)
    assert honesty(judge_one(lambda x: x + x, double, again=True)).status == "pass"
    assert time.perf_counter is frozen


# What is found.


def test_a_replaced_function_is_put_back_and_named(judge_one: Any) -> None:
    """A right answer does not excuse a call that leaves torch.equal replaced; the function is named and is back."""
    before = torch.equal

    def fused(x: T) -> T:
        torch.equal = lambda a, b: True  # type: ignore[assignment]
        return x + x

    failure = judge_one(fused, double).failure
    assert failure.identity == "honesty:tampers"
    assert failure.evidence["replaced"] == ["torch.equal"]
    assert torch.equal is before


def test_a_function_of_ours_replaced_before_the_call_is_found(judge_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that replaces a function of the judge while it is imported, before any call, is found too."""
    from pytest_fusion.verdict import slices

    monkeypatch.setattr(slices, "selected", lambda *a: None)
    failure = judge_one(lambda x: x + x, double).failure
    assert failure.identity == "honesty:tampers"
    assert failure.evidence["replaced"] == ["pytest_fusion.verdict.slices.selected"]


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
    assert failure.evidence["cause"] == "late-work"


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
    assert failure.evidence["cause"] == "cached-answer"


@pytest.mark.parametrize(("right_elsewhere", "status"), [(5, "unknown"), (100, "fail")])
def test_a_wrong_answer_at_an_old_address_may_be_chance(
    judge_one: Any, monkeypatch: pytest.MonkeyPatch, right_elsewhere: int, status: str
) -> None:
    """Only a kernel that is right elsewhere time and again knows the address."""
    answers = itertools.chain(["out"], [None] * right_elsewhere, itertools.repeat("out"))
    monkeypatch.setattr(later.LaterCalls, "_wrong", lambda self, call: next(answers))
    assert honesty(judge_one(double, double, again=True)).status == status


def test_results_of_earlier_calls_stay(judge_one: Any) -> None:
    """A buffer that is returned again changes what an earlier call returned, which counts as shared memory."""
    space = torch.empty(64)

    def fused(x: T) -> T:
        return torch.mul(x, 2, out=space[: x.numel()].view(x.shape))

    failure = judge_one(fused, double).failure
    assert failure.identity == "honesty:overwritten"
    assert failure.evidence["cause"] == "aliasing"


def test_who_asks_for_the_caller_is_found(judge_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is right only while pytest's variable is set fails, though its stack shows the test."""
    import os

    monkeypatch.setenv("PYTEST_CURRENT_TEST", "here")
    failure = judge_one(lambda x: x * (2 if "PYTEST_CURRENT_TEST" in os.environ else 3), double).failure
    assert failure.identity == "honesty:caller"
    assert failure.evidence["cause"] == "detects-test"
    assert os.environ["PYTEST_CURRENT_TEST"] == "here"


def test_an_answer_by_shape_is_no_wrong_value(judge_one: Any) -> None:
    """A cache that spoils every call of one shape is told as a kept answer, not as a kernel that computes wrongly."""
    kept: dict[Any, T] = {}
    result = judge_one(lambda x: kept.setdefault(x.shape, x + x), double, again=True)
    assert result.failure.identity == "repeat:stale"
    assert result.failure.evidence["cause"] == "cached-answer"


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
        verdict = honesty(result)
        assert verdict.status == "pass", verdict
        assert set(verdict.evidence["ran"]) == {"values", "address", "caller"}


def test_an_earlier_answer_of_a_kernel_that_may_vary_is_told(judge_one: Any) -> None:
    """A result that is kept by its input's address is that of other values, whatever its last bits may be."""
    kept: dict[int, T] = {}

    def fused(x: T) -> T:
        return kept.setdefault(x.data_ptr(), sums_in_any_order(x)).clone()

    verdict = honesty(judge_one(fused, row_sums, deterministic=False))
    assert verdict.status == "fail"
    assert verdict.evidence["cause"] == "cached-answer"


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
