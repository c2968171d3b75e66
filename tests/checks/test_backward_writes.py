"""Check ``gradients``: what backward writes that is not its own: saved tensors, results, the upstream gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fusion import SpecError
from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.checks.context import CaseResult
from pytest_fusion.checks.gradients import further
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor
from tests.checks.judged import concluded, hazards, of_x, plain_cases

T = torch.Tensor
# Its upstream gradient is random and contiguous.
CASE = Case({"rows": 5, "hidden": 7}, "float32", {"x": TensorCase("float32")}, seed=5)


def tanh(x: T) -> T:
    return torch.tanh(x)


class Keeping(torch.autograd.Function):
    """``tanh(x)`` whose backward does ``spoil`` to one of: what it saved for itself, its result, its buffer."""

    spoil = ""
    buffer: T

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        y = torch.tanh(x)
        own = y.clone()
        ctx.save_for_backward(y)
        ctx.own, ctx.used = own, False
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        if ctx.used and Keeping.spoil == "own, once":
            raise RuntimeError("backward a second time: what it needs was used up")
        ctx.used = True
        (y,), (g,) = ctx.saved_tensors, gradients
        dx = (1 - ctx.own * ctx.own) * g
        if Keeping.spoil.startswith("own"):
            ctx.own.data.mul_(0.5)
        if Keeping.spoil == "result":
            y.data.mul_(0.5)
        if Keeping.spoil == "buffer":
            if not hasattr(ctx, "buffer"):
                ctx.buffer = torch.zeros_like(dx)
            return ctx.buffer.add_(dx) if ctx.buffer.any() else ctx.buffer.copy_(dx)
        return dx


@pytest.mark.parametrize(("spoil", "words", "least"), [("own", "ctx.own", 5), ("buffer", "second backward", 1)])
def test_what_a_second_backward_lacks_is_a_hazard(
    judge_one: Any, monkeypatch: pytest.MonkeyPatch, spoil: str, words: str, least: int
) -> None:
    """What the first one had used up is named, and the case goes on; what was saved shows in any case."""
    monkeypatch.setattr(Keeping, "spoil", spoil)
    results = [judge_one(of_x(Keeping), torch.tanh, grad=True, case=case) for case in plain_cases(6)]
    found = [(result, hazard) for result in results for hazard in hazards(result, "second-backward")]
    assert len(found) >= least, "but where the upstream gradient is zero"
    assert {hazard.identity for _, hazard in found} == {"gradients:again:dx"}
    assert all(words in hazard.reason for _, hazard in found)
    assert all(result.differs is not None and bool(result.differs[1].any()) for result, _ in found), "for a picture"
    assert {result.failure for result in results} == {None}
    assert concluded(found[0][0], "gradients").status == "pass"


def test_a_result_that_backward_changes_is_wrong(judge_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller still holds it."""
    monkeypatch.setattr(Keeping, "spoil", "result")
    results = [judge_one(of_x(Keeping), torch.tanh, grad=True, case=case) for case in plain_cases(4)]
    assert {result.failure.identity for result in results} == {"gradients:output:out"}
    assert "its caller still holds" in results[0].failure.reason


def test_a_hazard_hides_nothing_that_comes_after_it(judge_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second backward that is wrong, and gradients that depend on the mode: both are found in one case."""
    monkeypatch.setattr(Keeping, "spoil", "own")

    def fused(x: T) -> T:
        return Keeping.apply(x) if torch.is_grad_enabled() else torch.tanh(x) + 0.5

    result = judge_one(fused, torch.tanh, grad=True, again=True, case=CASE)
    assert hazards(result, "second-backward")
    assert result.failure is not None
    assert "under torch.no_grad()" in result.failure.reason


@pytest.mark.slow
def test_a_buffer_that_is_used_up_may_be_refused_a_second_time(judge_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only backward itself sees it may overwrite if a second backward then says so."""
    for spoil in ("own, once", ""):
        monkeypatch.setattr(Keeping, "spoil", spoil)
        for case in plain_cases(8):
            assert judge_one(of_x(Keeping), torch.tanh, grad=True, case=case).failure is None


def test_a_returned_gradient_that_the_next_backward_overwrites_is_a_hazard(judge_one: Any) -> None:
    """One buffer for the gradients of all backward passes, each of them right when it is returned."""

    class Shared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T) -> T:
            ctx.buffer = torch.zeros_like(x, memory_format=torch.contiguous_format)
            ctx.turn = 0
            return x * 3

        @staticmethod
        def backward(ctx: Any, *gradients: T) -> Any:
            ctx.turn += 1
            return ctx.buffer.copy_(gradients[0] * 3)

    class Late(Shared):
        @staticmethod
        def backward(ctx: Any, *gradients: T) -> Any:
            ctx.turn += 1
            ctx.buffer.data.fill_(7.0)
            return gradients[0] * 3 if ctx.turn > 1 else ctx.buffer.data.copy_(gradients[0] * 3)

    for case in plain_cases(8):
        assert judge_one(of_x(Shared), lambda x: x * 3, grad=True, case=case).failure is None
    results = [judge_one(of_x(Late), lambda x: x * 3, grad=True, case=case) for case in plain_cases(8)]
    found = [hazard for result in results for hazard in hazards(result, "second-backward")]
    assert {hazard.identity for hazard in found} == {"gradients:overwritten:dx"}


def test_a_gradient_that_the_kernel_stores_by_itself_is_one_too_many(judge_one: Any) -> None:
    """Setting ``.grad`` in backward, or ``requires_grad`` of an input, is autograd's business."""

    class Storing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T) -> T:
            ctx.x = x
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: T) -> Any:
            ctx.x.grad = gradients[0] * 2
            return gradients[0] * 2

    failure = judge_one(of_x(Storing), lambda x: x * 2, grad=True).failure
    assert failure.identity == "gradients:extra:x"


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_inputs_that_may_be_overwritten_have_gradients_too(examine: Any, where: str, factor: float) -> None:
    """``clobbers=``: a kernel that stores its gradient into its input is judged like any other."""

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T) -> T:
            y = torch.tanh(x)
            ctx.save_for_backward(y)
            ctx.x = x.detach()
            if where == "forward":
                ctx.x.zero_()
            return y

        @staticmethod
        def backward(ctx: Any, *gradients: T) -> Any:
            (y,) = ctx.saved_tensors
            dx = factor * (1 - y * y) * gradients[0]
            return ctx.x.copy_(dx) if where == "backward" else dx

    plain = {"x": tensor("rows columns", layouts=("contiguous", "step"))}
    record = examine(of_x(InPlace), tanh, plain, cases=30, grad=True, clobbers="x")
    assert record.verdict == ("pass" if factor == 1.0 else "fail"), record.message
    assert record.checks["gradients"]["cases"] > (10 if factor == 1.0 else 0)


class Over(torch.autograd.Function):
    """``2 * x`` with its gradient written over the upstream one."""

    @staticmethod
    def forward(_: Any, x: T) -> T:
        return x * 2

    @staticmethod
    def backward(_: Any, *gradients: T) -> T:
        return gradients[0].mul_(2)


def doubled(x: T) -> T:
    return x * 2


def of_upstream(result: CaseResult) -> list[tuple[str, str]]:
    """Status and identity of what was found of upstream gradients."""
    return [(v.status, v.identity) for v in result.verdicts if "upstream" in v.identity]


def test_an_upstream_gradient_that_a_residual_shares_is_wrong(judge_one: Any) -> None:
    """Of ``f(x) + z`` the gradient of z is what backward left in it; the failure says how to accept that."""
    failures = [judge_one(of_x(Over), doubled, grad=True, case=case).failure for case in plain_cases(8)]
    found = [failure for failure in failures if failure is not None and failure.check == "gradients"]
    assert {(each.identity, each.cause) for each in found} == {("gradients:upstream:out", "upstream-overwritten")}
    assert "of `out + z` the gradient of z is wrong in 12 of 12 element(s)" in found[0].reason
    assert "clobbers='grad_outputs'" in found[0].reason


def test_an_upstream_gradient_that_no_graph_misses_is_a_hazard(judge_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the residual cannot be run, backward's write is noted and what follows is judged."""
    monkeypatch.setattr(further, "_residual", lambda *_: {})
    result = judge_one(of_x(Over), doubled, grad=True, case=CASE, again=True)
    assert of_upstream(result) == [("hazard", "gradients:upstream-overwritten:out")]
    assert concluded(result, "gradients").facts["no_grad"] == "same bits"


class Reusing(Over):
    """The same, with a gradient that is wrong, or with what it needs used up."""

    spoil = ""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        ctx.factor = torch.full((), 2.0)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> T:  # type: ignore[override]
        dx = gradients[0].mul_(ctx.factor + 0.1 * (Reusing.spoil == "factor"))
        if Reusing.spoil == "saved":
            ctx.factor.mul_(0.5)
        return dx


@pytest.mark.parametrize(
    ("spoil", "status", "words"),
    [("", "pass", ""), ("saved", "pass", "ctx.factor"), ("factor", "fail", "gradient of x")],
)
def test_giving_up_the_upstream_gradient_gives_up_nothing_else(
    judge_one: Any, monkeypatch: pytest.MonkeyPatch, spoil: str, status: str, words: str
) -> None:
    """Its own overwriting is not looked at, nor taken for what a second backward lacks; other faults are found."""
    monkeypatch.setattr(Reusing, "spoil", spoil)
    result = judge_one(of_x(Reusing), doubled, grad=True, case=CASE, again=True, clobbers="grad_outputs")
    verdict = concluded(result, "gradients")
    assert (verdict.status, of_upstream(result)) == (status, [])
    found = [verdict, *hazards(result, "second-backward")]
    assert len(found) == 1 + (spoil == "saved")
    assert words in found[-1].reason


def test_an_input_may_not_be_overwritten_with_the_upstream_gradient(judge_one: Any) -> None:
    """``clobbers="grad_outputs"`` speaks of no input."""

    class Both(Over):
        @staticmethod
        def forward(ctx: Any, x: T) -> T:
            ctx.x = x.detach()
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: T) -> T:  # type: ignore[override]
            ctx.x.zero_()
            return gradients[0].mul_(2)

    failure = judge_one(of_x(Both), doubled, grad=True, case=CASE, clobbers="grad_outputs").failure
    assert (failure.check, failure.identity) == ("inputs", "inputs:x:backward")


def test_the_upstream_gradient_is_given_up_by_its_name() -> None:
    """A misspelled one is corrected, and one without gradients is refused."""
    spec: dict[str, Any] = {"fused": tanh, "reference": tanh, "inputs": {"x": tensor("rows hidden")}}
    assert FusionSpec(**spec, grad=True, clobbers=("x", "grad_outputs")).given_up == ("x",)
    with pytest.raises(SpecError, match="did you mean 'grad_outputs'"):
        FusionSpec(**spec, grad=True, clobbers="grad_output")
    with pytest.raises(SpecError, match="grad= is False"):
        FusionSpec(**spec, clobbers="grad_outputs")
