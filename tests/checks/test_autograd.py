"""The part of check ``gradients`` that costs more calls: modes, second derivatives, orders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.function import once_differentiable

from pytest_fusion import interpreter
from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.checks.context import CaseResult
from pytest_fusion.run import saved_tensors
from tests.checks.judged import concluded, hazards, of_x
from tests.sweeps import sweep

interpreter.enable()
triton = pytest.importorskip("triton")
tl = triton.language
interpreted = pytest.mark.skipif(not interpreter.installed(), reason=str(interpreter.problem()))

T = torch.Tensor
CASES = [Case({"rows": 5, "hidden": 7}, "float32", {"x": TensorCase("float32")}, seed=seed) for seed in range(12)]


def evidence(result: CaseResult) -> dict[str, Any]:
    """What ``gradients`` saw of a case that passed."""
    assert result.failure is None, result.failure
    return concluded(result, "gradients").facts


def silu(x: T) -> T:
    return x * torch.sigmoid(x)


class Silu(torch.autograd.Function):
    """With a backward that torch can follow: it is computed from the input."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradients[0] * s * (1 + x * (1 - s))


class Partial(Silu):
    """With one factor from an intermediate result that autograd does not know."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        s = torch.sigmoid(x)
        ctx.save_for_backward(x, s)
        return x * s

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        x, s = ctx.saved_tensors
        return gradients[0] * s * (1 + x * (1 - s))


class Refusing(Partial):
    """The same, which says that it cannot be differentiated again."""

    backward = staticmethod(once_differentiable(Partial.backward))


class Detached(Partial):
    """With a backward by a kernel that autograd knows nothing of, as Triton launches are."""

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        with torch.no_grad():
            return Partial.backward(ctx, *gradients)


def test_a_second_derivative_that_lacks_a_term_is_a_hazard(judge_one: Any) -> None:
    """A number is returned and it is wrong: nobody would notice."""
    results = [judge_one(of_x(Partial), silu, grad=True, again=True, case=case) for case in CASES[:4]]
    found = [hazard for result in results for hazard in hazards(result, "second-derivative")]
    assert {hazard.identity for hazard in found} == {"gradients:second:x"}
    assert "once_differentiable" in found[0].reason
    assert {result.failure for result in results} == {None}


class Nowhere(Silu):
    """With a backward whose own derivative is NaN: the slope of a root at 0."""

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        (x,) = ctx.saved_tensors
        return Silu.backward(ctx, *gradients) + 0 * torch.sqrt(x - x.detach())


def stopped(x: T) -> T:
    return x * torch.sigmoid(x).detach() + x.detach() * torch.sigmoid(x) - (x * torch.sigmoid(x)).detach()


@pytest.mark.slow
@pytest.mark.parametrize(("fused", "told"), [(of_x(Nowhere), "is off by nan"), (stopped, "or by detach()")])
def test_a_second_derivative_is_no_number_or_torchs_own(judge_one: Any, fused: Any, told: str) -> None:
    """NaN is no small error, and who wrote no autograd.Function saved nothing."""
    results = [judge_one(fused, silu, grad=True, again=True, case=case) for case in CASES]
    found = [hazard for result in results for hazard in hazards(result, "second-derivative")]
    assert {hazard.identity for hazard in found} == {"gradients:second:x"}
    assert told in found[0].reason


@sweep(("function", "second"), [(Silu, "right"), (Refusing, "refused"), (Detached, "missing")])
def test_a_second_derivative_is_right_or_refused(judge_one: Any, function: Any, second: str) -> None:
    """All terms, an error, and a gradient without a graph, for which torch itself raises, are answers."""
    seen = {
        evidence(judge_one(of_x(function), silu, grad=True, again=True, case=case))["second_derivative"]
        for case in CASES
    }
    assert seen == {second, "not judged"}, "not judged where the upstream gradient is zero"


class Linear(Silu):
    """``2 * x``, whose gradient depends on no input, by a kernel that autograd knows nothing of."""

    @staticmethod
    def forward(_: Any, x: T) -> T:  # type: ignore[override]
        return 2 * x

    @staticmethod
    def backward(_: Any, *gradients: T) -> Any:  # type: ignore[override]
        return 2 * gradients[0].detach()


@pytest.mark.parametrize(
    ("function", "reference"), [(Detached, silu), (Silu, silu), (Refusing, silu), (Linear, lambda x: 2 * x)]
)
def test_what_is_not_connected_is_a_hazard(judge_one: Any, function: Any, reference: Any) -> None:
    """Gradients whose graph leads nowhere, where a derivative by an input would not be zero."""
    results = [judge_one(of_x(function), reference, grad=True, again=True, case=case) for case in CASES[:3]]
    found = [hazard for result in results for hazard in hazards(result, "second-derivative")]
    assert {hazard.identity for hazard in found} == ({"gradients:second:missing"} if function is Detached else set())
    assert all("not connected to x" in hazard.reason for hazard in found)


def test_sixteen_bits_are_too_few_to_judge_a_second_derivative(judge_one: Any) -> None:
    """Half precision is not asked: its rounding is as large as small terms are."""
    half = Case({"rows": 5, "hidden": 7}, "float16", {"x": TensorCase("float16")}, seed=1)
    result = judge_one(of_x(Partial), silu, grad=True, again=True, case=half, tolerance="auto")
    assert evidence(result)["second_derivative"] == "not judged"


@pytest.mark.slow
def test_results_are_right_in_every_mode(judge_one: Any) -> None:
    """Right under ``no_grad`` and ``inference_mode``, where bits may differ from those of training."""
    seen = evidence(judge_one(of_x(Silu), silu, grad=True, again=True))
    assert (seen["no_grad"], seen["inference_mode"]) == ("same bits", "same bits")

    def otherwise(x: T) -> T:
        return silu(x.double()).float() if not torch.is_grad_enabled() else silu(x)

    seen = evidence(judge_one(otherwise, silu, grad=True, again=True))
    assert (seen["no_grad"], seen["inference_mode"]) == ("other bits", "other bits")


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_a_mode_that_breaks_the_kernel_fails(judge_one: Any, mode: str) -> None:
    """Wrong results, an exception, or a graph all the same."""
    applies = torch.is_inference_mode_enabled if mode == "inference_mode" else lambda: not torch.is_grad_enabled()

    def wrong(x: T) -> T:
        return silu(x) * 1.5 if x.requires_grad and applies() else silu(x)

    def raises(x: T) -> T:
        if x.requires_grad and applies():
            raise RuntimeError("no graph to keep this for")
        return silu(x)

    failure = judge_one(wrong, silu, grad=True, again=True).failure
    assert failure.identity.startswith("gradients:")
    assert "results are wrong" in failure.reason
    failure = judge_one(raises, silu, grad=True, again=True).failure
    assert (failure.check, failure.facts["error"]) == ("error", "RuntimeError")
    assert judge_one(raises, silu, grad=True, again=True, rejects=RuntimeError).failure is None

    def with_graph(x: T) -> T:
        with torch.enable_grad():
            return silu(x)

    assert judge_one(with_graph, silu, grad=True, again=True).failure.identity == "gradients:no_grad:graph"
    assert judge_one(with_graph, with_graph, grad=True, again=True).failure is None


class WithInput(Silu):
    """Hands its input back as a second result, as a norm without a residual hands back the sum that it normed."""

    @staticmethod
    def forward(ctx: Any, x: T) -> tuple[T, T]:  # type: ignore[override]
        return Silu.forward(ctx, x), x.reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        return Silu.backward(ctx, gradients[0]) + gradients[1]


def test_an_input_handed_back_requires_grad_in_every_mode(judge_one: Any) -> None:
    """That is the caller's doing; a fresh result that requires grad without a graph is the kernel's."""

    def reference(x: T) -> tuple[T, T]:
        return silu(x), x + 0

    why = {"structure": "hands its input back"}
    result = judge_one(of_x(WithInput), reference, grad=True, again=True, without=why)
    assert evidence(result)["inference_mode"] == "same bits"

    def fresh(x: T) -> tuple[T, T]:
        y, copy = silu(x), x + 0
        return y, copy if torch.is_grad_enabled() or torch.is_inference_mode_enabled() else copy.requires_grad_()

    failure = judge_one(fresh, reference, grad=True, again=True).failure
    assert failure.identity == "gradients:no_grad:graph"


def test_few_cases_are_asked(judge_one: Any) -> None:
    """Only those that more is asked of anyway; the check itself passes without."""
    assert "no_grad" not in evidence(judge_one(of_x(Silu), silu, grad=True))
    assert judge_one(of_x(Partial), silu, grad=True).failure is None


def test_saved_tensors_are_found_behind_other_nodes() -> None:
    """Those of every ``autograd.Function`` in the graph and what it keeps on ``ctx``, none of torch's own."""
    x = torch.ones(3, requires_grad=True)
    y = Partial.apply(Silu.apply(x * 2)) + 1
    assert sorted(saved_tensors.saved([y])) == [
        "Partial: saved_tensors[0]",
        "Partial: saved_tensors[1]",
        "Silu: saved_tensors[0]",
    ]
    assert saved_tensors.saved([x]) == {}
    y.sum().backward()
    assert saved_tensors.saved([y]) == {}, "freed"


@triton.jit
def weight_gradient(g, out, columns, stride, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    tl.atomic_add(out + at, tl.load(g + row * stride + at, mask=at < columns), mask=at < columns)


@triton.jit
def shift_gradient(g, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(out + 0 * at, tl.load(g + at, mask=at < n), mask=at < n)


class Shift(torch.autograd.Function):
    """``x + b`` with one ``b`` for all, whose gradient the lanes of one program add up by atomics."""

    @staticmethod
    def forward(_: Any, x: T, b: T) -> T:
        return x + b

    @staticmethod
    def backward(_: Any, *gradients: T) -> Any:
        g, db = gradients[0].contiguous(), torch.zeros(1)
        if g.numel():
            shift_gradient[(1,)](g, db, g.numel(), BLOCK=triton.next_power_of_2(g.numel()))
        return gradients[0].clone(), db


@pytest.mark.slow
@interpreted
def test_a_gradient_by_atomics_of_one_program_fails_unless_declared(examine: Any) -> None:
    """The lanes of one program come in no order either."""
    from pytest_fusion.spec.inputs import tensor

    inputs = {"x": tensor("n"), "b": tensor("1")}

    def fused(x: T, b: T) -> T:
        result: T = Shift.apply(x, b)
        return result

    record = examine(fused, lambda x, b: x + b, inputs, cases=30, grad=True)
    assert (record.failed_check, record.cause) == ("repeat", "nondeterministic"), record.message
    record = examine(fused, lambda x, b: x + b, inputs, cases=30, grad=True, deterministic={"db": False})
    assert record.verdict == "pass", record.message


class Bias(torch.autograd.Function):
    """``x + b`` whose bias gradient is added up by atomics."""

    @staticmethod
    def forward(_: Any, x: T, b: T) -> T:
        return x + b

    @staticmethod
    def backward(_: Any, *gradients: T) -> Any:
        g = gradients[0].contiguous()
        db = torch.zeros(g.shape[1])
        if g.numel():
            weight_gradient[(len(g),)](g, db, g.shape[1], g.stride(0), BLOCK=triton.next_power_of_2(g.shape[1]))
        return g, db


@pytest.mark.slow
@interpreted
def test_gradients_by_atomics_fail_unless_declared(examine: Any) -> None:
    """The order of additions shows in the gradient, by the name under which it may be declared."""
    from pytest_fusion.spec.inputs import tensor

    inputs = {"x": tensor("rows columns"), "b": tensor("columns")}

    def fused(x: T, b: T) -> T:
        result: T = Bias.apply(x, b)
        return result

    record = examine(fused, lambda x, b: x + b, inputs, cases=30, grad=True)
    assert (record.failed_check, record.cause) == ("repeat", "nondeterministic"), record.message
    assert 'deterministic={"db": False}' in record.message
    record = examine(fused, lambda x, b: x + b, inputs, cases=30, grad=True, deterministic={"db": False})
    assert record.verdict == "pass", record.message
