"""Configs of an autotuned kernel that give other bits: a hazard, and wrong where the spec promises one result."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_fusion.report.record import TestRecord
from pytest_fusion.spec.dims import dim
from pytest_fusion.spec.inputs import tensor
from tests.checks.row_sums import by_rows, summed
from tests.interpreted import triton_interpreted
from tests.sweeps import sweep

triton = triton_interpreted("kernels on tensors of the CPU")

tl = triton.language
MATRIX = {"x": tensor("rows columns", layouts="contiguous")}
DIMS = {"rows": dim(16, 40), "columns": dim(0, 300)}
SIZES = (16, 32, 32, 64)


@triton.jit
def row_sum(x, out, columns, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    total = tl.zeros([WAYS], tl.float32)
    for start in range(0, columns, BLOCK):
        for part in range(0, BLOCK, WAYS):
            c = start + part + tl.arange(0, WAYS)
            total += tl.load(x + tl.program_id(0) * columns + c, mask=c < columns, other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def summing(*ways: int) -> Any:
    """Sums of rows under a config for each: as many partial sums as the config says, in blocks of another size."""
    configs = [triton.Config({"BLOCK": 64, "WAYS": many}, num_warps=turn + 1) for turn, many in enumerate(ways)]
    return by_rows(triton.autotune(configs, key=["columns"])(row_sum))


def test_other_bits_are_a_hazard_with_their_classes(examine: Any) -> None:
    """Two configs add in the same order, two in others; every sum is right."""
    record: TestRecord = examine(summing(*SIZES), summed, MATRIX, dims=DIMS, cases=24)
    assert record.verdict == "pass", record.message
    (found,) = [one for one in record.findings if one["code"] == "config-variant-bits"]
    assert found["level"] == "hazard"
    assert "config 0 (BLOCK=64, WAYS=16, " in found["message"]
    entry = record.checks["configs"]
    assert [[one["number"] for one in group] for group in entry["classes"]["row_sum"]] == [[0], [1, 2], [3]]
    assert "3 classes of equal bits" in entry["reason"]


PROMISE = {"invariant": ("configs", "rows")}


@sweep("dims", [{"rows": 16, "columns": 200}, DIMS], ids=("one size", "any size"))
def test_a_promise_of_one_result_for_all_configs_is_held(examine: Any, dims: dict[str, Any]) -> None:
    """``invariant="configs"``: the pair of configs and the smallest case."""
    record: TestRecord = examine(summing(*SIZES), summed, MATRIX, dims=dims, cases=60, **PROMISE)
    assert (record.failed_check, record.cause) == ("configs", "config-variant-bits"), record.message
    assert record.checks["configs"]["configs"] == [0, 1]
    assert record.case is not None
    assert record.case["dims"]["rows"] == 16


def test_configs_of_one_result_fulfil_the_promise(examine: Any) -> None:
    """A dim beside ``"configs"`` means what it always does."""
    record: TestRecord = examine(summing(32, 32, 32), summed, MATRIX, dims=DIMS, cases=24, **PROMISE)
    assert record.verdict == "pass", record.message
    assert [one["code"] for one in record.findings] == []
    assert record.checks["invariance"]["verdict"] == "pass"


def test_a_difference_past_the_smaller_block_is_found(examine: Any) -> None:
    """Rows of up to 256 columns are one block under either config, and have the same bits."""
    configs = [triton.Config({"BLOCK": size, "WAYS": size}) for size in (256, 1024)]
    fused = by_rows(triton.autotune(configs, key=["columns"])(row_sum))
    longer = {**DIMS, "columns": dim(0, 700)}
    record: TestRecord = examine(fused, summed, MATRIX, dims=longer, cases=60, invariant="configs")
    assert (record.failed_check, record.cause) == ("configs", "config-variant-bits"), record.message
    assert record.case is not None
    assert record.case["dims"]["columns"] > 256


def test_configs_that_an_interpreted_kernel_cannot_tell_apart_are_one(examine: Any) -> None:
    """More numbers of warps and stages than configs that run; the kernel reads neither."""
    configs = [
        triton.Config({"BLOCK": 64, "WAYS": 32}, num_warps=warps, num_stages=stages)
        for warps in (1, 2, 4, 8, 16)
        for stages in (1, 2, 3, 4, 5, 6)
    ]
    fused = by_rows(triton.autotune(configs, key=["columns"])(row_sum))
    record: TestRecord = examine(fused, summed, MATRIX, dims=DIMS, cases=60)
    (group,) = record.checks["configs"]["classes"]["row_sum"]
    assert [one["number"] for one in group] == list(range(30))


@pytest.mark.parametrize("promise", [{}, {"invariant": "configs"}], ids=["of interest", "promised"])
def test_under_a_budget_some_configs_stand_for_all(examine: Any, promise: dict[str, str]) -> None:
    """The hazard needs two of them; a promise is held for each."""
    ways = (16, 16, 16, 32, 32, 32, 64)
    blocks = [triton.Config({"BLOCK": 64 * (1 + turn), "WAYS": many}) for turn, many in enumerate(ways)]
    fused = by_rows(triton.autotune(blocks, key=["columns"])(row_sum))
    given = {"dims": {**DIMS, "columns": dim(0, 900)}, "cases": 40, "seconds": 1e6, **promise}
    record: TestRecord = examine(fused, summed, MATRIX, **given)
    assert record.verdict == ("fail" if promise else "pass"), record.message
    (found,) = [one for one in record.findings if one["code"] == "config-variant-bits"]
    assert found["level"] == ("wrong" if promise else "hazard")


def test_without_another_config_nothing_is_compared(examine: Any) -> None:
    """A kernel of one config, and one whose outputs may vary, have no classes."""
    record: TestRecord = examine(summing(16), summed, MATRIX, dims=DIMS, cases=6, invariant="configs")
    assert record.checks["configs"]["verdict"] == "unknown"
    record = examine(summing(*SIZES), summed, MATRIX, dims=DIMS, cases=12, deterministic=False)
    assert not [one for one in record.findings if one["code"] == "config-variant-bits"]


def test_a_promise_holds_for_configs_that_pruning_leaves_for_long_rows_alone(examine: Any) -> None:
    """Many short rows pass every block by their elements; two configs are left only past 128 columns."""
    configs = [triton.Config({"BLOCK": 64, "WAYS": ways}, num_warps=turn + 1) for turn, ways in enumerate((32, 32, 64))]

    def prune(configs: list[Any], named: dict[str, Any], **_: Any) -> list[Any]:
        return configs if named["columns"] > 128 else configs[:2]

    kernel = triton.autotune(configs, key=["columns"], prune_configs_by={"early_config_prune": prune})(row_sum)
    record: TestRecord = examine(by_rows(kernel), summed, MATRIX, dims=DIMS, cases=60, **PROMISE)
    assert (record.failed_check, record.cause) == ("configs", "config-variant-bits"), record.message
    assert record.checks["configs"]["configs"] == [0, 2]
