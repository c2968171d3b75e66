"""Every config of an autotuned kernel is judged alone, and the call that tunes against later ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case, Config, TensorCase
from pytest_fusion.case.choosing import search
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.modes import Replay
from pytest_fusion.engine.request import Request
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run import autotuned
from pytest_fusion.spec import values
from pytest_fusion.spec.dims import dim
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor
from tests.interpreted import triton_interpreted
from tests.sweeps import sweep

triton = triton_interpreted("the plants are judged by what an interpreted access shows")

tl = triton.language
T = torch.Tensor

VECTOR = {"x": tensor("n", layouts="contiguous")}
CASE = Case({"n": 35}, "float32", {"x": TensorCase("float32")}, seed=1)


@triton.jit
def scaled(x, out, n, BLOCK: tl.constexpr, LOADED: tl.constexpr, STORED: tl.constexpr, FACTOR: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n + LOADED, other=0.0)
    tl.store(out + i, value * FACTOR, mask=i < n - n % STORED)


def plan(block: int = 16, *, loaded: int = 0, stored: int = 1, factor: float = 2.0, **more: Any) -> Any:
    """A config of ``scaled`` that is right unless it is told otherwise."""
    return triton.Config({"BLOCK": block, "LOADED": loaded, "STORED": stored, "FACTOR": factor}, **more)


def doubling(*plans: Any, into: Any = torch.empty_like, **tuning: Any) -> Any:
    """``2 * x`` by a kernel of its own, with its own cache, tuned over these configs."""
    kernel = triton.autotune(list(plans), **{"key": ["n"], **tuning})(scaled)

    def fused(x: T) -> T:
        out = into(x)
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
        return out

    return fused


def doubled(x: T) -> T:
    return 2 * x


WRONG = {
    "a load past the end": (plan(32, loaded=1), "bounds"),
    "a tail that is not stored": (plan(32, stored=16), "unwritten"),
    "another factor": (plan(32, factor=2.5), "values"),
}


@sweep("name", WRONG, fast=1)
def test_the_wrong_config_is_named(examine: Any, name: str) -> None:
    """It fails as the check that sees it says, while the configs before it are right."""
    wrong, inner = WRONG[name]
    record: TestRecord = examine(doubling(plan(), plan(8), wrong), doubled, VECTOR, cases=40)
    assert (record.failed_check, record.cause) == ("configs", "bad-config"), record.message
    found = record.checks["configs"]
    assert found["reason"].startswith("config 2 (BLOCK=32, ")
    assert "of scaled: " in found["reason"]
    assert (found["index"], found["inner"], found["config"]["BLOCK"]) == (2, inner, 32)
    assert found["found"]
    assert record.case is not None
    assert record.case["configs"] == {"scaled": {"number": 2, "launch": "chosen"}}


def test_a_wrong_config_shrinks_and_keeps_its_name(examine: Any) -> None:
    """The minimum shows the same config with the same bug, from any size at which it fails."""
    fused = doubling(plan(), plan(32, stored=16))
    record: TestRecord = examine(fused, doubled, VECTOR)
    assert (record.verdict, record.failed_check, record.cause) == ("fail", "configs", "bad-config"), record.message
    assert record.checks["configs"]["index"] == 1
    assert "smallest case: n=1, " in record.message


@triton.jit
def summed(x, out, n, BLOCK: tl.constexpr, num_stages: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    whole = n // (BLOCK * num_stages) * num_stages
    # Staged tiles, and the rest that a pipeline drains: for two stages alone somebody forgot it.
    for tile in range(whole):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(x + i)
    if num_stages != 2:
        for tile in range(whole, tl.cdiv(n, BLOCK)):
            i = tile * BLOCK + tl.arange(0, BLOCK)
            total += tl.load(x + i, mask=i < n, other=0.0)
    tl.store(out, tl.sum(total, 0))


def test_a_pipeline_that_skips_its_tail_is_found(examine: Any) -> None:
    """A config's number of stages reaches a kernel that asks for it, as in Triton."""
    tuned = triton.autotune([triton.Config({"BLOCK": 4}, num_stages=s) for s in (1, 2, 3)], key=[])(summed)

    def fused(x: T) -> T:
        out = x.new_empty(())
        tuned[(1,)](x, out, x.numel())
        return out

    record = examine(fused, lambda x: x.sum(), VECTOR, cases=20)
    assert (record.failed_check, record.cause) == ("configs", "bad-config"), record.message
    assert record.checks["configs"]["config"]["num_stages"] == 2
    assert record.checks["configs"]["inner"] == "values"


@triton.jit
def doubled_in_place(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


BLOCKS = [triton.Config({"BLOCK": 8}), triton.Config({"BLOCK": 16})]


def in_place(**tuning: Any) -> Any:
    kernel = triton.autotune(BLOCKS, key=["n"], **tuning)(doubled_in_place)

    def fused(x: T) -> None:
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, x.numel())

    return fused


def double_(x: T) -> None:
    x.mul_(2)


@pytest.mark.slow
def test_an_in_place_kernel_must_survive_its_tuning(examine: Any) -> None:
    """Without ``restore_value`` each timed run doubles again; with it the first call is like any other."""
    layouts = {"x": tensor("n", layouts="contiguous")}
    record: TestRecord = examine(in_place(), double_, layouts, mutates="x")
    assert (record.failed_check, record.cause) == ("configs", "autotune-side-effect"), record.message
    assert "restore_value=" in record.message
    record = examine(in_place(restore_value=["x"]), double_, layouts, mutates="x", cases=60)
    assert record.verdict == "pass", record.message
    assert record.checks["configs"]["reason"] == "ran 2 of 2 configs of doubled_in_place"


@triton.jit
def product(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a + rows[:, None] * K + k, mask=(rows[:, None] < M) & (k < K), other=0.0)
        right = tl.load(b + k[:, None] * N + columns, mask=(k[:, None] < K) & (columns < N), other=0.0)
        total += tl.dot(left, right, input_precision="ieee")
    tl.store(c + rows[:, None] * N + columns, total, mask=(rows[:, None] < M) & (columns < N))


def test_a_right_matmul_passes_in_every_config(examine: Any) -> None:
    """Four tilings, which round differently: each is judged against the reference and not against another."""
    tilings = [
        triton.Config({"BM": m, "BN": n, "BK": k})
        for m, n, k in ((16, 16, 16), (16, 32, 16), (32, 16, 32), (32, 32, 16))
    ]
    kernel = triton.autotune(tilings, key=["M", "N", "K"])(product)

    def fused(a: T, b: T) -> T:
        (m, k), n = a.shape, b.shape[1]
        c = a.new_empty(m, n)
        kernel[lambda meta: (triton.cdiv(m, meta["BM"]), triton.cdiv(n, meta["BN"]))](a, b, c, m, n, k)
        return c

    inputs = {name: tensor(dims, layouts="contiguous") for name, dims in (("a", "m k"), ("b", "k n"))}
    record: TestRecord = examine(fused, lambda a, b: a @ b, inputs, cases=24)
    assert record.verdict == "pass", record.message
    assert record.checks["configs"]["verdict"] == "pass"
    assert record.checks["configs"]["reason"].startswith("ran 4 of 4 configs of product")


def test_a_backward_kernels_configs_are_judged_by_gradients(examine: Any) -> None:
    """The wrong config is launched in backward only."""
    backward = doubling(plan(), plan(8), plan(32, factor=2.5))

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: T) -> T:
            return 2 * x

        @staticmethod
        def backward(_: Any, gradient: T) -> T:
            return backward(gradient.contiguous())

    def fused(x: T) -> T:
        return Double.apply(x)

    record: TestRecord = examine(fused, doubled, VECTOR, grad=True, cases=20)
    assert (record.failed_check, record.cause) == ("configs", "bad-config"), record.message
    assert (record.checks["configs"]["index"], record.checks["configs"]["inner"]) == (2, "gradients")


def _out_of_resources(_: Any) -> None:
    raise triton.runtime.errors.OutOfResources(262144, 232448, "shared memory")


@pytest.mark.slow
def test_a_config_that_cannot_run_is_unknown_and_the_others_are_judged(examine: Any) -> None:
    """Nothing is known about a config that the device has no room for; one after it that is wrong still fails."""
    large = plan(64, pre_hook=_out_of_resources)
    record: TestRecord = examine(doubling(plan(), large, plan(8)), doubled, VECTOR)
    assert record.verdict == "pass", record.message
    entry = record.checks["configs"]
    assert entry["verdict"] == "unknown"
    assert entry["reason"].startswith("ran 2 of 3 configs of scaled; config 1 (BLOCK=64, ")
    assert "could not run: OutOfResources: out of resource: shared memory, Required: 262144" in entry["reason"]
    record = examine(doubling(plan(), large, plan(8, loaded=1)), doubled, VECTOR, cases=30)
    assert record.checks["configs"].get("index") == 2, (record.message, record.checks["configs"])


@triton.jit
def refusing(x, out, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK <= 16, "at most 16")
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_a_config_that_a_static_assert_refuses_is_no_finding(examine: Any, backward: bool) -> None:
    """Triton's tuner passes over it, so nobody ever runs it."""
    kernel = triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=[])(refusing)

    def launch(x: T) -> T:
        out = torch.empty_like(x)
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
        return out

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: T) -> T:
            return 2 * x

        @staticmethod
        def backward(_: Any, gradient: T) -> T:
            return launch(gradient.contiguous())

    def fused(x: T) -> T:
        return Double.apply(x) if backward else launch(x)

    record: TestRecord = examine(fused, doubled, VECTOR, grad=backward)
    assert record.verdict == "pass", record.message
    assert record.checks["configs"]["verdict"] == "pass"
    counted = "ran 1 of 2 configs of refusing, 1 refused by its own static_assert"
    assert record.checks["configs"]["reason"] == counted


def test_pruned_configs_are_not_run_but_counted(examine: Any) -> None:
    """What the kernel drops for all arguments is no finding, however wrong it is."""
    prune = {"early_config_prune": lambda configs, args, **_: [c for c in configs if c.kwargs["BLOCK"] < 64]}
    fused = doubling(plan(), plan(64, loaded=1), plan(8), prune_configs_by=prune)
    record: TestRecord = examine(fused, doubled, VECTOR, cases=20)
    assert record.verdict == "pass", record.message
    assert record.checks["configs"]["verdict"] == "pass", record.checks["configs"]["reason"]
    assert record.checks["configs"]["reason"] == "ran 2 of 3 configs of scaled, 1 dropped by its own pruning"


@pytest.mark.slow
def test_many_configs_take_turns(examine: Any) -> None:
    """A case has one; all have run when the test ends, so a wrong one near the end of the list is found."""
    many = [plan(16, num_warps=1 + i) for i in range(30)]
    record: TestRecord = examine(doubling(*many), doubled, VECTOR, cases=200)
    assert record.verdict == "pass", record.message
    assert record.checks["configs"]["reason"] == "ran 30 of 30 configs of scaled"
    few = examine(doubling(*many), doubled, VECTOR, cases=8)
    assert few.checks["configs"]["verdict"] == "unknown"
    assert few.checks["configs"]["reason"].endswith(" of 30 configs of scaled; more cases would reach the others")
    record = examine(doubling(*many[:-1], plan(32, loaded=1)), doubled, VECTOR, cases=200)
    assert record.checks["configs"]["index"] == 29


def test_pruning_that_makes_configs_of_its_own_leaves_the_check_unknown(examine: Any) -> None:
    """They are in no list, so nobody can say which of them there are."""
    prune = {"early_config_prune": lambda configs, args, **_: [plan(c.kwargs["BLOCK"] // 2) for c in configs]}
    record: TestRecord = examine(doubling(plan(), plan(64), prune_configs_by=prune), doubled, VECTOR, cases=6)
    assert record.checks["configs"]["verdict"] == "unknown"
    assert "configs that are not in its list" in record.checks["configs"]["reason"]


def test_a_replay_launches_the_config_of_its_case(tmp_path: Path) -> None:
    """With the first config the case is right."""
    many = [plan(16, num_warps=1 + i) for i in range(29)]

    def outer() -> None: ...

    search.adopt(outer, outer)
    spec = FusionSpec(fused=doubling(*many, plan(32, loaded=1)), reference=doubled, inputs=VECTOR, dtypes="float32")
    job = Job(spec, Request(nodeid="test", isolate="off", root=tmp_path), outer, {})
    record = Replay(Case.from_json(CASE.with_(configs={"scaled": Config(29)}).as_json())).run(job)
    assert record.checks["configs"]["index"] == 29
    assert Replay(CASE).run(job).verdict == "pass"


def test_of_two_kernels_the_one_at_fault_is_named(examine: Any) -> None:
    """By its config, and by its tuning; the other one keeps its first config."""

    def twice(first: Any, second: Any, x: T) -> None:
        x.copy_(first(x))
        second(x)

    def fourfold(x: T) -> None:
        x.mul_(4)

    right, wrong = doubling(plan(), plan(8)), doubling(plan(), plan(8), plan(32, factor=2.5))
    restored = in_place(restore_value=["x"])
    record: TestRecord = examine(partial(twice, wrong, restored), fourfold, VECTOR, mutates="x", cases=12)
    assert record.case is not None
    assert record.case["configs"] == {"scaled": {"number": 2, "launch": "chosen"}}, record.message
    record = examine(partial(twice, right, in_place()), fourfold, VECTOR, mutates="x", cases=20)
    assert record.cause == "autotune-side-effect", record.message
    assert record.case is not None
    assert record.case["configs"] == {"doubled_in_place": {"number": 0, "launch": "tuning"}}
    record = examine(partial(twice, right, restored), fourfold, VECTOR, mutates="x", cases=20)
    assert record.verdict == "pass", record.message


@pytest.mark.parametrize("configs_of_it", [0, 1])
def test_without_a_choice_nothing_is_known(examine: Any, configs_of_it: int) -> None:
    """No autotuned kernel, or one that has a single config: the check says so and passes nothing."""
    fused = doubling(plan()) if configs_of_it else doubled
    record: TestRecord = examine(fused, doubled, VECTOR, cases=6)
    assert record.checks["configs"] == {
        "verdict": "unknown",
        "reason": "nothing to judge: no autotuned kernel was launched",
        "cases": 0,
    }


def test_the_tuner_stays_as_it_was() -> None:
    """Every attribute and the cache: a later call neither tunes again nor takes the config of a case.

    While a case lasts, its launcher reads the config of that case.
    """
    kernel = triton.autotune([plan(), plan(32, factor=3.0)], key=["n"])(scaled)
    x, out = torch.ones(4), torch.empty(4)

    def launched() -> float:
        kernel[(1,)](x, out, 4)
        return float(out[0])

    assert launched() == 2
    before = {**vars(kernel), "cache": dict(kernel.cache)}
    for config, value, ran in ((Config(), 2, {0}), (Config(1), 3, {1}), (Config(0, "tuning"), 2, {0})):
        seen: dict[int, autotuned.Tuned] = {}
        with autotuned.launched({"scaled": config}, seen):
            assert launched() == value
            assert kernel.best_config is kernel.configs[next(iter(ran))]
            assert list(kernel.cache.values()) == [kernel.best_config]
        (tuned,) = seen.values()
        assert (tuned.kernel, tuned.survivors, tuned.launched) == ("scaled", {0, 1}, ran)
    assert {**vars(kernel), "cache": dict(kernel.cache)} == before


def test_a_case_within_a_case_has_its_own_configs() -> None:
    """A slice of a batch is judged while the batch is."""
    kernel = triton.autotune([plan(), plan(32, factor=3.0)], key=["n"])(scaled)
    x, out = torch.ones(4), torch.empty(4)
    found = []
    with autotuned.launched({"scaled": Config(1)}, {}):
        for configs in ({}, {"scaled": Config(1)}):
            with autotuned.launched(configs, {}):
                kernel[(1,)](x, out, 4)
                found.append(float(out[0]))
        kernel[(1,)](x, out, 4)
        found.append(float(out[0]))
    assert found == [2, 3, 3]


def test_hooks_act_as_in_a_real_run() -> None:
    """A config's own hook before every run of it; the tuner's around the timed runs, and before the first real one."""
    called: list[str] = []
    plans = [plan(8, pre_hook=lambda _: called.append("8")), plan(16, pre_hook=lambda _: called.append("16"))]
    kernel = triton.autotune(
        plans,
        key=[],
        pre_hook=lambda _, reset_only=False: called.append("reset" if reset_only else "before"),
        post_hook=lambda _, exception: called.append("after"),
    )(scaled)
    x, out = torch.ones(4), torch.empty(4)
    with autotuned.launched({"scaled": Config(1)}, {}):
        kernel[(1,)](x, out, 4)
    assert called == ["16"]
    called.clear()
    with autotuned.launched({"scaled": Config(0, "tuning")}, {}):
        kernel[(1,)](x, out, 4)
        assert called == ["8", "before", "after", "16", "before", "after", "reset", "8"]
        kernel[(1,)](x, out, 4)
    assert called[8:] == ["8"]


@triton.jit
def softmax_of_rows(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    value = tl.load(x + row * columns + c, mask=c < columns, other=-float("inf"))
    value = tl.exp(value - tl.max(value, axis=0))
    tl.store(out + row * columns + c, value / tl.sum(value, axis=0), mask=c < columns)


@sweep("keyed", [False, True])
def test_a_config_that_only_another_call_may_choose_is_found(examine: Any, keyed: bool) -> None:
    """Pruning leaves blocks that hold a row; a key without the length serves a long row with a short one's block."""
    blocks = [triton.Config({"BLOCK": block}) for block in (8, 16, 64)]
    prune = {
        "early_config_prune": lambda configs, args, **_: [c for c in configs if c.kwargs["BLOCK"] >= args["columns"]]
    }
    kernel = triton.autotune(blocks, key=["columns"] if keyed else [], prune_configs_by=prune)(softmax_of_rows)

    def fused(x: T) -> T:
        out = torch.empty_like(x)
        kernel[(x.shape[0],)](x, out, x.shape[1])
        return out

    inputs, dims = {"x": tensor("rows columns", layouts="contiguous", values=values.normal())}, {"columns": dim(1, 64)}
    record: TestRecord = examine(fused, lambda x: x.softmax(-1), inputs, dims={**dims, "rows": dim(1)}, cases=200)
    if keyed:
        assert record.verdict == "pass", record.message
    else:
        assert (record.failed_check, record.cause) == ("configs", "bad-config"), record.message
        assert "key= lacks what pruning depends on" in record.message
