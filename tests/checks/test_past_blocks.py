"""Each config of an autotuned kernel is tried on sizes past its own blocks, whichever of them the tuner picks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fusion.case.plan import Plan, make_plan
from pytest_fusion.checks.configs.past_blocks import Reach
from pytest_fusion.engine.cases import limits_of
from pytest_fusion.engine.profiles import PROFILES
from pytest_fusion.report.record import TestRecord
from pytest_fusion.spec.dims import dim
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor
from tests.checks.row_sums import by_rows, summed
from tests.interpreted import triton_interpreted
from tests.sweeps import sweep

triton = triton_interpreted("kernels on tensors of the CPU")

tl = triton.language
T = torch.Tensor
MATRIX = {"x": tensor("rows cols", layouts="contiguous")}
ALL = 400
# Few of the long rows that every kernel is tried on, which cost most.
SHORT = {"rows": dim(0, 4), "cols": dim(0, 3000)}
NEVER = 1 << 20


@triton.jit
def row_sum(x, out, cols, BLOCK: tl.constexpr, FIRST: tl.constexpr, MOST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * cols + c, mask=c < cols, other=0.0)
        # The trips of a row of at most MOST blocks that are wrong, from number FIRST on.
        if (start // BLOCK >= FIRST) & (cols // BLOCK < MOST):
            value = value * 1.5
        total += value
    tl.store(out + row, tl.sum(total, 0))


def config(block: int, first: int = NEVER, most: int = NEVER) -> Any:
    return triton.Config({"BLOCK": block, "FIRST": first, "MOST": most})


def summing(*configs: Any, **tuning: Any) -> Any:
    return by_rows(triton.autotune(list(configs), **{"key": ["cols"], **tuning})(row_sum))


@pytest.mark.parametrize(
    ("first", "most"),
    [
        pytest.param(1, NEVER, id="second trip", marks=pytest.mark.slow),
        pytest.param(2, NEVER, id="third trip", marks=pytest.mark.slow),
        pytest.param(1, 2, id="of two trips alone", marks=pytest.mark.slow),
    ],
)
def test_what_only_one_config_gets_wrong_past_its_block_is_found(examine: Any, first: int, most: int) -> None:
    """The tuner picks a config of 64, whose neighbours say nothing of the one of 1024 elements."""
    fused = summing(config(64), config(256), config(1024, first, most))
    record: TestRecord = examine(fused, summed, MATRIX, cases=ALL, dims=SHORT)
    assert (record.verdict, record.failed_check, record.cause) == ("fail", "configs", "bad-config"), record.message
    assert record.checks["configs"]["index"] == 2
    assert "config 2 (BLOCK=1024, " in record.message
    assert record.case is not None
    assert record.case["dims"]["cols"] > 1024


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, NEVER], ids=["wrong", "right"])
def test_a_batch_gets_as_many_rows_as_blocks_hold(examine: Any, first: int) -> None:
    """Sums over all rows of a batch, by blocks of rows: the batch is the one size that can be longer than a block."""
    columns = summing(config(64), config(1024, first))
    record: TestRecord = examine(
        lambda x: columns(x.reshape(-1, 4).t().contiguous()),
        lambda x: x.reshape(-1, 4).sum(0),
        {"x": tensor("*batch 4", layouts="contiguous")},
        cases=ALL,
    )
    assert record.verdict == ("fail" if first == 1 else "pass"), record.message
    if first == 1:
        assert record.cause == "bad-config"
        assert record.case is not None
        assert record.case["dims"]["batch"][0] > 1024
    else:
        assert record.checks["configs"]["reason"].startswith("ran 2 of 2 configs of row_sum")


@pytest.mark.slow
def test_right_configs_pass(examine: Any) -> None:
    """Each was tried past its own block, and nothing is said to be left."""
    record: TestRecord = examine(summing(config(64), config(256), config(1024)), summed, MATRIX, cases=ALL)
    assert record.verdict == "pass", record.message
    assert record.checks["configs"]["verdict"] == "pass"
    assert record.checks["configs"]["reason"].startswith("ran 3 of 3 configs of row_sum")


@pytest.mark.slow
def test_what_the_spec_rules_out_is_told_and_no_finding(examine: Any) -> None:
    """No row is longer than a block of 1024, so its second trip is nobody's; the report says that none was made."""
    fused = summing(config(64), config(1024, first=1))
    dims = {"rows": dim(0, 12), "cols": dim(0, 300)}
    record: TestRecord = examine(fused, summed, MATRIX, cases=ALL, dims=dims)
    assert record.verdict == "pass", record.message
    entry = record.checks["configs"]
    assert entry["verdict"] == "pass"
    assert entry["reason"].startswith("ran 2 of 2 configs of row_sum; config 1 (BLOCK=1024, ")
    assert "met no axis longer than BLOCK=1024: dims= admits none" in entry["reason"]


@sweep(
    ("cases", "block", "shape", "words"),
    [
        (6, 1024, "rows cols", "more cases would reach it"),
        (ALL, 1 << 16, "rows cols 4", "a case of that size has more elements than this profile allows"),
    ],
    ids=["cases", "limits"],
)
def test_what_could_not_be_tried_is_unknown(examine: Any, cases: int, block: int, shape: str, words: str) -> None:
    """Too few cases, or one that would be too large: the spec admits the size, so nothing is known of it."""
    inputs = {"x": tensor(shape, layouts="contiguous")}
    fused = summing(config(64), config(block))
    record: TestRecord = examine(
        lambda x: fused(x.flatten(1)), lambda x: x.flatten(1).sum(-1), inputs, cases=cases, dims={"rows": dim(0, 4)}
    )
    assert record.verdict == "pass", record.message
    entry = record.checks["configs"]
    assert entry["verdict"] == "unknown"
    assert f"met no axis longer than BLOCK={block}: {words}" in entry["reason"]


@pytest.mark.slow
def test_a_config_that_pruning_drops_there_needs_no_such_case(examine: Any) -> None:
    """A tile that must hold the row is never launched with a longer one, however wrong it would be."""

    def fitting(configs: Any, named: Any, **_: Any) -> Any:
        return [one for one in configs if one.kwargs["BLOCK"] >= named["cols"] or one.kwargs["BLOCK"] == 1024]

    fused = summing(config(1024), config(256, first=1), prune_configs_by={"early_config_prune": fitting})
    record: TestRecord = examine(fused, summed, MATRIX, cases=ALL, dims=SHORT)
    assert record.verdict == "pass", record.message
    assert record.checks["configs"]["verdict"] == "pass"
    assert record.checks["configs"]["reason"].startswith("ran 2 of 2 configs of row_sum")


@pytest.mark.slow
def test_a_config_that_pruning_leaves_for_long_rows_alone_is_found(examine: Any) -> None:
    """No small case runs it: it is met where its own block says that it may survive."""

    def worth(configs: Any, named: Any, **_: Any) -> Any:
        return [one for one in configs if one.kwargs["BLOCK"] < named["cols"] or one.kwargs["BLOCK"] == 16]

    fused = summing(config(16), config(512, first=1), prune_configs_by={"early_config_prune": worth})
    record: TestRecord = examine(fused, summed, MATRIX, cases=ALL, dims=SHORT)
    assert (record.failed_check, record.checks["configs"]["index"]) == ("configs", 1), record.message


@triton.jit
def row_scale(x, gradient, out, cols, BLOCK: tl.constexpr, FIRST: tl.constexpr, MOST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    up = tl.load(gradient + row)
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        value = 2 * up * tl.load(x + row * cols + c, mask=c < cols, other=0.0)
        if start // BLOCK >= FIRST:
            value = value * 1.5
        tl.store(out + row * cols + c, value, mask=c < cols)


@pytest.mark.slow
def test_a_backward_kernels_config_is_tried_past_its_block(examine: Any) -> None:
    """Its case asks for gradients."""
    kernel = triton.autotune([config(32), config(512, first=1)], key=["cols"])(row_scale)

    class Squares(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T) -> T:
            ctx.save_for_backward(x)
            return (x * x).sum(-1)

        @staticmethod
        def backward(ctx: Any, gradient: T) -> T:
            (x,) = ctx.saved_tensors
            out = torch.empty_like(x)
            if x.numel():
                kernel[(len(x),)](x, gradient.contiguous(), out, x.shape[1])
            return out

    def fused(x: T) -> T:
        return Squares.apply(x)

    record: TestRecord = examine(fused, lambda x: (x * x).sum(-1), MATRIX, grad=True, cases=ALL, dims=SHORT)
    assert (record.failed_check, record.cause) == ("configs", "bad-config"), record.message
    assert (record.checks["configs"]["index"], record.checks["configs"]["inner"]) == (1, "gradients")


def plan_of(shape: str, **dims: Any) -> Plan:
    spec = FusionSpec(fused=summed, reference=summed, inputs={"x": tensor(shape)}, dims=dims, dtypes="float32")
    return make_plan(spec, limits=limits_of(PROFILES["dev"], torch.device("cpu")))


def asked(reach: Reach, plan: Plan) -> list[tuple[dict[str, Any], list[int]]]:
    """The sizes of all cases, each with the numbers of the configs that it is for, which are right on it."""
    found = []
    while (aim := reach.following(plan, 0, 24)) is not None:
        found.append((dict(aim.case.sizes), [index for _, index in aim.configs]))
        for key in aim.configs:
            reach.note(key, plan.spec, aim.case)
    return found


def reach_of(*blocks: int) -> Reach:
    reach = Reach()
    for index, block in enumerate(blocks):
        reach.add((0, index), {"BLOCK": block})
    return reach


def test_one_long_case_serves_all_configs() -> None:
    """More than two of the largest block come first; then each config has its own block, and one element more."""
    assert asked(reach_of(64, 256), plan_of("n")) == [
        ({"n": 528}, [1, 0]),
        ({"n": 257}, [1]),
        ({"n": 65}, [0]),
    ]


@pytest.mark.parametrize("block", [32, 48, 64, 256, 1024])
def test_the_rest_of_more_than_two_blocks_is_whole_vectors(block: int) -> None:
    """``K % 16 == 0`` lets a fast path leave out the mask, which blocks above 16 elements still need."""
    longest = max(sizes["n"] for sizes, _ in asked(reach_of(block), plan_of("n")))
    assert (longest % 16, longest % block, longest // block) == (0, 16, 2)


def test_a_case_that_is_rejected_leaves_shorter_ones_to_be_asked() -> None:
    """Too many programs for the largest block's case are no reason to spare the smaller ones theirs."""
    reach, plan = reach_of(64, 256), plan_of("n")
    sizes = []
    while (aim := reach.following(plan, 0, 24)) is not None:
        sizes.append(aim.case.sizes["n"])
    assert sizes == [528, 144, 257, 65, 528, 144]
    assert reach.lacking((0, 0), plan.spec) == {64: "rejected"}


def test_multiples_are_rounded_up_past_the_block() -> None:
    """Rounded down, as sizes are elsewhere, one more than a block would be the block."""
    assert [sizes["n"] for sizes, _ in asked(reach_of(64), plan_of("n", n=dim(multiple_of=16)))] == [144, 80]


def test_the_largest_that_dims_admit_is_past_one_block() -> None:
    """Where two blocks are too long the bound itself is asked."""
    assert [sizes["n"] for sizes, _ in asked(reach_of(64), plan_of("n", n=dim(max=100)))] == [100]


def test_bounded_dims_grow_together() -> None:
    """No dim may be longer than the block; all elements are more, as a kernel sees them that flattens its input."""
    reach, plan = reach_of(1024), plan_of("rows cols", rows=dim(max=20), cols=dim(max=300))
    assert [sizes for sizes, _ in asked(reach, plan)] == [{"rows": 7, "cols": 300}]
    assert reach.lacking((0, 0), plan.spec) == {1024: "dims"}


def test_what_earlier_cases_met_is_not_asked_again() -> None:
    """Sizes that a config has been right on count, whatever case they came from."""
    reach, plan = reach_of(16), plan_of("n")
    for _ in range(2):
        first = reach.following(plan, 0, 24)
        assert first is not None
        reach.note((0, 0), plan.spec, first.case)
    assert reach.following(plan, 0, 24) is None
    assert reach.lacking((0, 0), plan.spec) == {}
