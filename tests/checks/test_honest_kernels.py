"""Check ``honesty`` accuses no honest kernel, whatever it keeps, starts, or leaves as garbage."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from pytest_fusion import values
from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.spec.inputs import tensor
from tests.checks.judged import concluded, double

T = torch.Tensor


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
        assert concluded(result, "honesty").status == "pass"
        assert "values" in concluded(result, "honesty").facts["ran"]
        assert "caller" in concluded(result, "honesty").facts["ran"]


def packed_by_content() -> Callable[[T, T], T]:
    packed: dict[Any, T] = {}

    def fused(x: T, w: T) -> T:
        at = w.shape, float(w.double().sum())
        if at not in packed:
            packed[at] = w.T.contiguous() + 0
        return x @ packed[at]

    return fused


@pytest.mark.slow
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
    assert "alive" in concluded(result, "honesty").facts["not_run"]["address"]


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
    assert concluded(in_place, "honesty").status == "pass"
    view = judge_one(lambda x: x.view(-1), lambda x: x.reshape(-1), again=True)
    assert concluded(view, "honesty").status == "pass"
    spread = judge_one(expanded, lambda x: (x * 2).sum(0, keepdim=True).expand(x.shape), again=True)
    assert concluded(spread, "honesty").status == "pass"


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

    verdict = concluded(judge_one(fused, double, again=True), "honesty")
    assert verdict.status == "pass"
    assert "another thread" in verdict.facts["not_run"]["caller"]


def test_a_patch_that_stood_before_is_nobodys(judge_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer frozen by a fixture is neither a finding nor put back."""
    frozen = lambda: 7.0  # noqa: E731
    monkeypatch.setattr(time, "perf_counter", frozen)
    assert concluded(judge_one(lambda x: x + x, double, again=True), "honesty").status == "pass"
    assert time.perf_counter is frozen
