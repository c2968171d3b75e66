"""Check ``invariance``, of gradients: which must keep a slice's bits, which need not, and how they are left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion import fused_equivalent
from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.context import Context
from pytest_fusion.checks.invariance.batches import InvarianceState
from pytest_fusion.checks.verdict import GRADIENTS, Verdict
from pytest_fusion.diagnosis.repro import replay_file as replays
from pytest_fusion.errors import SpecError
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor
from tests.sweeps import sweep

T = torch.Tensor
Backward = Callable[[T, T, T], T]
INPUTS = {"x": tensor("rows hidden"), "w": tensor("hidden")}
CASE = Case({"rows": 5, "hidden": 9}, "float32", {n: TensorCase("float32") for n in "xw"}, seed=1)


def reference(x: T, w: T) -> T:
    return torch.softmax(x, -1) * w


def total(x: T, *, halves: bool = False) -> T:
    """The sum over the last axis from left to right, or of two such sums."""
    if halves:
        half = x.shape[-1] // 2
        return total(x[:, :half]) + total(x[:, half:])
    found = torch.zeros(len(x))
    for k in range(x.shape[-1]):
        found = found + x[:, k]
    return found


def forward(x: T) -> T:
    wide = (x - x.amax(-1, keepdim=True)).exp() if x.numel() else x.exp()
    return wide / total(wide)[:, None]


def dx(y: T, g: T, w: T, *, halves: bool = False) -> T:
    """From the softmax, the upstream gradient and the weight."""
    scaled = g * w
    return y * (scaled - total(scaled * y, halves=halves)[:, None])


def made(backward: Backward) -> Callable[[T, T], T]:
    """The kernel with this backward; its weight's gradient is a sum over all rows."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T, w: T) -> T:
            y = forward(x)
            ctx.save_for_backward(y, w)
            return y * w

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *given: T) -> Any:
            y, w = ctx.saved_tensors
            return backward(y, given[0], w), (given[0] * y).sum(0)

    return Kernel.apply  # type: ignore[no-any-return]


def by_rows(most: int) -> Backward:
    """Sums in two halves where there are more rows."""
    return lambda y, g, w: dx(y, g, w, halves=len(y) > most)


def beside(y: T, g: T, w: T) -> T:
    """The neighbour's gradient times zero is added."""
    return dx(y, g, w) + (y * 0).roll(1, 0)


def concluded(result: Any) -> list[Verdict]:
    return [verdict for verdict in result.verdicts if verdict.check == "invariance"]


@pytest.mark.parametrize("most", [1, 16, 127, 512, 2000])
def test_a_gradient_that_depends_on_the_batch_fails_with_the_threshold(judge_one: Any, most: int) -> None:
    """Forward keeps its bits and the gradients are right; the message says gradient, sizes, and what helps."""
    failure = judge_one(made(by_rows(most)), reference, INPUTS, case=CASE, invariant="rows", grad=True).failure
    assert failure.identity == "invariance:rows:gradients", failure.reason
    assert f"'s gradient change between {most} and {most + 1} rows (dx differs by up to" in failure.reason
    assert "the gradients of inputs with rows" in failure.reason
    assert GRADIENTS in failure.reason
    assert failure.facts["output"] == "dx"


def rarely(y: T, g: T, w: T) -> T:
    """Beside 200 rows one of ten is summed in halves."""
    rare = (y[..., :1] * 2**20).remainder(10).floor().eq(0)
    return torch.where(rare, dx(y, g, w, halves=True), dx(y, g, w)) if len(y) > 200 else dx(y, g, w)


@pytest.mark.slow
def test_a_case_of_few_wide_rows_is_asked_with_more() -> None:
    """Of two rows, repeated to 257, mostly none shows what one of ten does."""
    keywords: dict[str, Any] = {"inputs": INPUTS, "dtypes": "float32", "invariant": "rows", "grad": True}
    spec = FusionSpec(fused=made(rarely), reference=reference, **keywords)
    case = Case({"rows": 2, "hidden": 100}, "float32", {n: TensorCase("float32") for n in "xw"}, seed=1)
    assert judge_case(Context(spec, torch.device("cpu")), case, again=True).failure is None
    context = Context(spec, torch.device("cpu"))
    # As many as are asked before wider ones.
    context.state(InvarianceState).gradients.cases = {True: 6, False: 6}
    result = judge_case(context, case, again=True)
    assert result.failure is not None
    assert result.failure.identity == "invariance:rows:gradients"
    assert result.case.sizes["rows"] == 37
    again = judge_case(Context(spec, torch.device("cpu")), result.case, again=True).failure
    assert again is not None
    assert again.identity == "invariance:rows:gradients"
    honest = FusionSpec(fused=made(dx), reference=reference, **keywords)
    context = Context(honest, torch.device("cpu"))
    context.state(InvarianceState).gradients.cases = {True: 6, False: 6}
    assert judge_case(context, case, again=True).failure is None


def test_what_other_rows_hold_must_not_reach_a_gradient(judge_one: Any) -> None:
    """NaN in another row of the inputs, which a factor of zero lets through."""
    failure = judge_one(made(beside), reference, INPUTS, case=CASE, invariant="rows", grad=True).failure
    assert failure.identity == "invariance:rows:gradients"
    assert "gradient change when other rows are NaN" in failure.reason


@pytest.mark.slow
def test_a_whole_test_finds_and_shrinks_it(examine: Any, judge_one: Any, tmp_path: Path) -> None:
    """The smallest case has two rows; its cause is the batch, and its replay shows the same."""
    record = examine(made(by_rows(127)), reference, INPUTS, cases=30, invariant="rows", grad=True)
    assert (record.failed_check, record.cause) == ("invariance", "batch-variant"), record.message
    assert "change between 127 and 128 rows" in record.message
    assert record.case["dims"]["rows"] == 2
    (path,) = tmp_path.rglob("*.json")
    case = replays.read(path).case
    again = judge_one(made(by_rows(127)), reference, INPUTS, case=case, again=True, invariant="rows", grad=True)
    assert again.failure.identity == "invariance:rows:gradients"


@sweep("grad", [True, "x", "w"], fast=("w",))
def test_an_honest_backward_passes(examine: Any, grad: Any) -> None:
    """Row by row, in all layouts of the upstream gradient; the weight's sum over rows is not compared."""
    record = examine(made(dx), reference, INPUTS, cases=12, invariant="rows", grad=grad)
    assert record.verdict == "pass", record.message
    assert record.checks["invariance"]["verdict"] == "pass"


def test_the_layout_of_the_upstream_gradient_may_decide(judge_one: Any) -> None:
    """One row of a transposed gradient, which this seed draws, lies as in the whole one and not densely."""
    strides = set[tuple[int, ...]]()

    def backward(y: T, g: T, w: T) -> T:
        strides.add((len(g), *g.stride()))
        return dx(y, g, w, halves=g.stride(-1) == 1)

    case = CASE.with_(seed=30)
    assert judge_one(made(backward), reference, INPUTS, case=case, invariant="rows", grad=True).failure is None
    assert {(5, 1, 5), (1, 1, 5)} <= strides


def test_gradients_can_be_left_out(judge_one: Any) -> None:
    """By name with a reason, or where they may vary anyway; outputs are still asked about."""
    for keywords in ({"without": {GRADIENTS: "a product of torch's"}}, {"deterministic": {"dx": False}}):
        found = judge_one(made(by_rows(127)), reference, INPUTS, case=CASE, invariant="rows", grad=True, **keywords)
        assert found.failure is None
        assert [verdict.status for verdict in concluded(found)] == ["pass"]


def test_the_gradient_of_a_mean_may_depend_on_the_rows(judge_one: Any) -> None:
    """An output that does not follow the dim is promised nothing, so its upstream gradient asks nothing."""

    def fused(x: T, w: T) -> tuple[T, T]:
        y = made(dx)(x, w)
        return y.detach(), y.mean()

    def written(x: T, w: T) -> tuple[T, T]:
        y = reference(x, w)
        return y.detach(), y.mean()

    found = judge_one(fused, written, INPUTS, case=CASE, invariant="rows", grad=True)
    assert found.failure is None
    assert [verdict.status for verdict in concluded(found)] == ["pass"]


@pytest.mark.slow
def test_a_backward_that_is_refused_at_every_other_size_tells_nothing(judge_one: Any, examine: Any) -> None:
    """`unknown` with the reason, though the outputs kept their bits; nor is anything known of a single row."""

    def backward(y: T, g: T, w: T) -> T:
        if len(y) != CASE.sizes["rows"] or bool(y[0].isnan().any() | (y.flip(0) == y).all()):
            raise ValueError("not these")
        return dx(y, g, w)

    found = judge_one(made(backward), reference, INPUTS, case=CASE, invariant="rows", grad=True, rejects=ValueError)
    outputs, gradients = concluded(found)
    assert (found.failure, outputs.status, gradients.status) == (None, "pass", "unknown")
    assert "gradients, rows:" in gradients.reason
    record = examine(made(dx), reference, INPUTS, cases=6, invariant="rows", grad=True, dims={"rows": 1})
    assert record.checks["invariance"]["verdict"] == "unknown"
    assert "never more than 1" in record.checks["invariance"]["reason"]


def test_an_error_of_backward_at_another_size_is_that_cases_own(judge_one: Any) -> None:
    """A backward that raises for many rows fails ``error`` on a case of so many."""

    def backward(y: T, g: T, w: T) -> T:
        if len(y) > 100:
            raise RuntimeError("grid too large")
        return dx(y, g, w)

    found = judge_one(made(backward), reference, INPUTS, case=CASE, invariant="rows", grad=True)
    assert found.failure.check == "error"
    assert found.case.sizes["rows"] > 100


def test_the_part_has_a_name_that_a_spec_may_use() -> None:
    """``without=`` of a decorated test takes it, and a wrong one is corrected to it."""

    def declared(part: str) -> Any:
        def test_it(x: T, w: T) -> T:
            return made(dx)(x, w)

        return fused_equivalent(reference, inputs=INPUTS, invariant="rows", grad=True, without={part: "a reason"})(
            test_it
        )

    declared(GRADIENTS)
    with pytest.raises(SpecError, match="did you mean 'invariance:gradients'"):
        declared("invariance:gradient")
