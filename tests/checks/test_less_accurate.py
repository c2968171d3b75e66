"""Grade C as a finding: `less-accurate`, a hazard of outputs and of gradients, that ends no case."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.checks.verdict import Verdict
from pytest_fusion.spec.inputs import tensor
from tests.sweeps import sweep

T = torch.Tensor
LOW = Case({"rows": 24, "hidden": 48}, "bfloat16", {"x": TensorCase("bfloat16"), "y": TensorCase("bfloat16")}, seed=3)
INPUTS = {"x": tensor("rows hidden"), "y": tensor("rows hidden")}
ALLOW = {"less-accurate": "rounds half way, as eager PyTorch does"}


def swiglu(x: T, y: T) -> T:
    return (F.silu(x.float()) * y.float()).to(x.dtype)


def stored(x: T, y: T) -> T:
    return F.silu(x.float()).to(x.dtype) * y


def hazards(result: Any) -> list[Verdict]:
    return [verdict for verdict in result.verdicts if verdict.status == "hazard"]


def test_a_less_accurate_output_is_a_hazard(judge_one: Any) -> None:
    """The case goes on, and says which output, by which code, and what was allowed."""
    result = judge_one(stored, swiglu, INPUTS, case=LOW)
    assert result.failure is None
    (found,) = hazards(result)
    assert (found.check, found.code, found.output) == ("values", "less-accurate", "out")
    assert found.identity == "values:less-accurate:out"
    assert found.evidence.grade == "C"
    assert "is allowed" in found.reason
    assert result.evidence is None


def test_a_wrong_output_is_a_failure(judge_one: Any) -> None:
    """A factor that is missing is beyond any rounding."""
    failure = judge_one(
        lambda x, y: (F.silu(x.float()) * 1.1 * y.float()).to(x.dtype), swiglu, INPUTS, case=LOW
    ).failure
    assert (failure.identity, failure.evidence.grade) == ("values:out:finite", "D")
    assert "eager PyTorch in this dtype is off by" in failure.reason


def test_an_honest_kernel_has_no_hazard(judge_one: Any) -> None:
    """float32 inside and one rounding at the end is as good as the reference; so is eager PyTorch against itself."""
    assert not hazards(judge_one(swiglu, swiglu, INPUTS, case=LOW))
    assert not hazards(judge_one(stored, stored, INPUTS, case=LOW))


class FromOutput(torch.autograd.Function):
    """Softmax whose backward uses the probabilities that forward returned, in 16 bits; ``keep`` are other ones."""

    @staticmethod
    def forward(ctx: Any, x: T, factor: float) -> T:
        out = torch.softmax(x.float(), -1).to(x.dtype)
        ctx.save_for_backward(out)
        ctx.factor = factor
        return out

    @staticmethod
    def backward(ctx: Any, *given: T) -> tuple[T, None]:
        (p,), g = (t.float() for t in ctx.saved_tensors), given[0].float()
        return ((g - (p * g).sum(-1, keepdim=True)) * p * ctx.factor).to(given[0].dtype), None


def softmax(x: T) -> T:
    return torch.softmax(x.float(), -1).to(x.dtype)


def test_backward_from_a_stored_output_is_not_wrong(judge_one: Any) -> None:
    """Forward had to return its probabilities in 16 bits: a gradient from these is a hazard at most."""
    case = Case({"rows": 16, "hidden": 64}, "bfloat16", {"x": TensorCase("bfloat16")}, seed=5)
    result = judge_one(lambda x: FromOutput.apply(x, 1.0), softmax, case=case, grad=True)
    assert result.failure is None, result.failure.reason
    assert {(found.check, found.output) for found in hazards(result)} <= {("gradients", "dx")}


def test_a_gradient_with_a_wrong_factor_is_wrong(judge_one: Any) -> None:
    """Ten per cent too much is beyond twice what eager PyTorch loses."""
    case = Case({"rows": 16, "hidden": 64}, "bfloat16", {"x": TensorCase("bfloat16")}, seed=5)
    failure = judge_one(lambda x: FromOutput.apply(x, 1.1), softmax, case=case, grad=True).failure
    assert (failure.check, failure.identity) == ("gradients", "gradients:x:finite")


@pytest.mark.slow
def test_a_test_passes_with_the_hazard_among_its_findings(examine: Any) -> None:
    """One of 16-bit cases alone; with ``strict`` it fails, and with ``allow`` it does not."""
    for keywords, verdict in (({}, "pass"), ({"strict": True}, "fail"), ({"strict": True, "allow": ALLOW}, "pass")):
        record = examine(stored, swiglu, INPUTS, dtypes="bfloat16", cases=8, **keywords)
        assert record.verdict == verdict, record.message
        (found,) = record.findings
        assert (found["code"], found["level"], record.grade) == ("less-accurate", "hazard", "C")


def gated(q: T, k: T, g: T) -> T:
    state, out = torch.zeros_like(k[0]), []
    for step in range(len(k)):
        state = state * g[step].exp() + k[step]
        out.append(q[step] * state)
    return torch.stack(out)


class Gated(torch.autograd.Function):
    """The gradient of the gates as sums of ``q * dq - k * dk``, of which ``part`` is taken."""

    @staticmethod
    def forward(ctx: Any, q: T, k: T, g: T, part: float) -> T:
        ctx.save_for_backward(q, k, g)
        ctx.part = part
        return gated(q, k, g)

    @staticmethod
    def backward(ctx: Any, *given: T) -> tuple[T, T, T, None]:
        (q, k, g), up = ctx.saved_tensors, given[0]
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k)]
            dq, dk = torch.autograd.grad(gated(*leaves, g), leaves, up)
        terms = q * dq - ctx.part * k * dk
        return dq, dk, terms.flip(0).cumsum(0).flip(0), None


GATES = {name: tensor("steps n") for name in "qkg"}


@sweep("steps", [6, 1])
def test_a_gradient_that_cancels_is_not_wrong(judge_one: Any, steps: int) -> None:
    """The gate of the first step has no state to decay: its gradient is 0 in the reference, and a rounding here."""
    tensors, found = {name: TensorCase("float32") for name in GATES}, set()
    # Two that require all gradients, for a random upstream one.
    for seed in (2, 5):
        case = Case({"steps": steps, "n": 48}, "float32", tensors, seed=seed)
        result = judge_one(lambda q, k, g: Gated.apply(q, k, g, 1.0), gated, GATES, case=case, grad=True)
        assert result.failure is None, result.failure.reason
        found |= {hazard.output for hazard in hazards(result)}
        wrong = judge_one(lambda q, k, g: Gated.apply(q, k, g, 0.999), gated, GATES, case=case, grad=True)
        assert wrong.failure.identity == "gradients:g:finite"
    assert found == {"dg"}


def projected(x: T, y: T) -> T:
    return ((x.float() @ y.float().mT * 2.0**-20) @ y.float()).to(x.dtype)


def scaled_last(x: T, y: T, stored: Any) -> T:
    """What is ``stored`` between the two products passes the range of float16 without the scale."""
    return (stored(x.float() @ y.float().mT) @ y.float() * 2.0**-20).to(x.dtype)


def test_a_product_that_overflows_in_float16_is_less_accurate_and_a_square_is_wrong(judge_one: Any) -> None:
    """torch's own product is infinite there, and a second one takes 16 bits; a kernel has no reason to square so."""
    tensors = {name: TensorCase("float16", regime="hundred") for name in "xy"}
    case = Case({"rows": 24, "hidden": 48}, "float16", tensors, seed=3)
    result = judge_one(lambda x, y: scaled_last(x, y, lambda t: t.half().float()), projected, INPUTS, case=case)
    assert result.failure is None, result.failure.reason
    (found,) = hazards(result)
    assert (found.code, found.evidence.statistic) == ("less-accurate", "nonfinite")
    small = Case({"rows": 24, "hidden": 48}, "float16", {name: TensorCase("float16") for name in "xy"}, seed=3)
    wrong = judge_one(lambda x, y: scaled_last(x, y, lambda t: t / (t < 9)), projected, INPUTS, case=small)
    assert wrong.failure.identity == "values:out:nonfinite"
    squares = judge_one(
        lambda x, y: (x * x * y).sqrt() / 64, lambda x, y: (x.float() ** 2 * y.abs()).sqrt().to(x.dtype) / 64, INPUTS,
        case=case,
    )  # fmt: skip
    assert squares.failure.identity == "values:out:nonfinite"
