"""Check ``gradients``: values, layouts of the upstream gradient, what is missing, what backward must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.context import Context, Focus
from pytest_fusion.checks.gradients.upstream import Upstream
from pytest_fusion.report.record import TestRecord
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor
from tests.checks.judged import concluded
from tests.sweeps import sweep

T = torch.Tensor
INPUTS = {"x": tensor("rows columns"), "w": tensor("columns")}


def reference(x: T, w: T) -> T:
    return torch.tanh(x) * w


def right(y: T, w: T, g: T) -> tuple[Any, ...]:
    return g * w * (1 - y * y), (g * y).sum(0)


def kernel(backward: Callable[[T, T, T], tuple[Any, ...]]) -> Callable[[T, T], T]:
    """A fused forward with the given backward of saved ``tanh(x)``, ``w`` and upstream gradient."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T, w: T) -> T:
            y = torch.tanh(x)
            ctx.save_for_backward(y, w)
            return y * w

        @staticmethod
        def backward(ctx: Any, g: T) -> tuple[Any, ...]:
            return backward(*ctx.saved_tensors, g)

    def fused(x: T, w: T) -> T:
        return Fused.apply(x, w)  # by position: torch 2.11 takes no names here

    return fused


def flat(g: T) -> T:
    """The upstream gradient read as if it were contiguous, as a kernel does that is given no strides."""
    wanted = g.storage_offset() + g.numel()
    if g.numel() and g.untyped_storage().nbytes() >= wanted * g.element_size():
        return torch.as_strided(g, g.shape, (g.shape[1], 1), g.storage_offset())
    return g[:1, :1].expand(g.shape) if g.numel() else g


WRONG: dict[str, tuple[Callable[[T, T, T], tuple[Any, ...]], str, str | None]] = {
    "ignores the layout": (lambda y, w, g: right(y, w, flat(g)), "gradients", "gradient-layout"),
    "half of it": (lambda y, w, g: (right(y, w, g)[0] / 2, right(y, w, g)[1]), "gradients", "gradient-scale"),
    "none for the weight": (lambda y, w, g: (right(y, w, g)[0], None), "gradients", "gradient-missing"),
    "a term forgotten": (lambda y, w, g: (g * w, (g * y).sum(0)), "gradients", None),
    "the last row left out": (lambda y, w, g: (right(y, w, g)[0], (g * y)[:-1].sum(0)), "gradients", None),
    "writes the upstream gradient": (
        lambda y, w, g: (right(y, w, g), g.view(-1)[:1].zero_() if g.is_contiguous() else None)[0],
        "gradients",
        "upstream-overwritten",
    ),
    "raises": (lambda y, w, g: (g.view(-1)[::2].reshape(g.shape), None), "error", "raises"),
}


@sweep("name", WRONG, fast=set(WRONG) - {"a term forgotten", "the last row left out"})
def test_a_wrong_backward_fails(examine: Any, name: str) -> None:
    """Each is caught, most by ``gradients``, with the cause where an experiment shows one."""
    backward, check, cause = WRONG[name]
    record: TestRecord = examine(kernel(backward), reference, INPUTS, cases=40, grad=True)
    assert (record.verdict, record.failed_check) == ("fail", check), record.message
    if cause is not None:
        assert record.cause == cause, record.message


@sweep("dtype", ["float32", "float16", "bfloat16"])
def test_a_right_backward_passes(examine: Any, dtype: str) -> None:
    """Hand-written, in other order of operations, for every layout of the upstream gradient.

    In float32 inside, as fused kernels are: ``1 - y * y`` in 16 bit is off by a factor wherever y is near one.
    """

    def backward(y: T, w: T, g: T) -> tuple[Any, ...]:
        v, h = y.float(), g.float()
        return (w.float() * ((1 - v * v) * h)).to(g.dtype), (v * h).sum(0).to(w.dtype)

    fused = kernel(backward)
    record = examine(fused, reference, INPUTS, cases=40, grad=True, dtypes=dtype)
    assert record.verdict == "pass", record.message
    assert record.checks["gradients"]["verdict"] == "pass"
    assert record.checks["gradients"]["cases"] > 20


@pytest.mark.slow
def test_more_precise_inside_passes(examine: Any) -> None:
    """All of it in float32, rounded once: better than the reference is never wrong."""

    def fused(x: T, w: T) -> T:
        y = torch.softmax(x.float() * w.float(), -1)
        return y.to(x.dtype)

    def written(x: T, w: T) -> T:
        return torch.softmax(x * w, -1)

    for dtype in ("float16", "bfloat16"):
        record = examine(fused, written, INPUTS, cases=60, grad=True, dtypes=dtype)
        assert record.verdict == "pass", record.message


def test_an_output_without_a_graph_fails(examine: Any) -> None:
    """Computed under ``no_grad``, where the reference can be differentiated."""
    record = examine(torch.no_grad()(reference), reference, INPUTS, grad=True)
    assert (record.failed_check, record.cause) == ("gradients", "gradient-missing")


@pytest.mark.slow
def test_named_inputs_alone_are_asked_for(examine: Any) -> None:
    """``grad="x"``: a weight that gets no gradient is nobody's loss."""
    fused = kernel(lambda y, w, g: (right(y, w, g)[0], None))
    assert examine(fused, reference, INPUTS, cases=30, grad="x").verdict == "pass"
    assert examine(fused, reference, INPUTS, cases=30, grad=True).verdict == "fail"


@pytest.mark.slow
def test_a_gradient_that_varies_may_be_declared(examine: Any) -> None:
    """A random order of additions fails ``repeat`` unless the gradient is named in ``deterministic=``."""

    def backward(y: T, w: T, g: T) -> tuple[Any, ...]:
        return right(y, w, g)[0], (g * y)[torch.randperm(len(g))].sum(0)

    record = examine(kernel(backward), reference, INPUTS, cases=60, grad=True)
    assert (record.failed_check, record.cause) == ("repeat", "nondeterministic"), record.message
    record = examine(kernel(backward), reference, INPUTS, cases=60, grad=True, deterministic={"dw": False})
    assert record.verdict == "pass", record.message


def test_unknown_where_nobody_asks_or_nothing_can_be_differentiated(examine: Any) -> None:
    """Without ``grad=``, and with a reference that autograd cannot follow."""
    checks = examine(reference, reference, INPUTS).checks
    assert checks["gradients"]["verdict"] == "unknown"
    assert "not requested" in checks["gradients"]["reason"]
    signs = examine(torch.no_grad()(reference), torch.no_grad()(reference), INPUTS, grad=True).checks["gradients"]
    assert signs["verdict"] == "unknown"
    assert "do not depend" in signs["reason"]


@pytest.mark.slow
def test_every_upstream_layout_is_drawn(judge_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a few dozen seeds: expanded, zero, and every layout of a matrix."""
    seen: set[tuple[str, str]] = set()
    original = Upstream.lanes

    def lanes(self: Any, count: int) -> Any:
        found = original(self, count)
        seen.update((self.kind, layout.kind) for layout in self.layout.values())
        return found

    monkeypatch.setattr(Upstream, "lanes", lanes)
    for seed in range(80):
        tensors = {"x": TensorCase("float32"), "w": TensorCase("float32")}
        case = Case({"rows": 3, "columns": 4}, "float32", tensors, seed=seed)
        result = judge_one(kernel(right), reference, INPUTS, case=case, grad=True)
        assert result.failure is None, (seed, result.failure)
    kinds = {kind for kind, _ in seen}
    layouts = {layout for kind, layout in seen if kind == "random"}
    assert kinds == {"random", "expanded", "negative", "zero", "zero-rows"}
    assert layouts == {"contiguous", "transposed", "step", "padded"}


@pytest.mark.slow
def test_gaps_of_the_upstream_gradient_hold_nan(examine: Any) -> None:
    """A backward that multiplies what lies beside its rows by zero still depends on it."""

    def backward(y: T, w: T, g: T) -> tuple[Any, ...]:
        dx, dw = right(y, w, g)
        wide = g.dim() == 2 and g.stride(1) == 1 and g.stride(0) > g.shape[1] > 0 and len(g) > 1
        return (dx + 0 * g.as_strided((1, 1), (1, 1), g.storage_offset() + g.shape[1]), dw) if wide else (dx, dw)

    record = examine(kernel(backward), reference, INPUTS, cases=60, grad=True)
    assert record.failed_check in ("gradients", "bounds"), record.message
    assert record.grade is None


@pytest.mark.slow
def test_each_subset_of_the_inputs_is_asked_for(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three inputs that may require grad: all seven subsets are met within the default profile."""
    asked: set[tuple[str, ...]] = set()
    original = Upstream.of

    def of(trial: Any, wanted: Any) -> Upstream:
        asked.add(tuple(wanted))
        return original(trial, wanted)

    monkeypatch.setattr(Upstream, "of", of)

    def affine(x: T, w: T, b: T) -> T:
        return x * w + b

    inputs = {"x": tensor("rows columns"), "w": tensor("columns"), "b": tensor("columns")}
    assert examine(affine, affine, inputs, cases=150, grad=True).verdict == "pass"
    assert len(asked) == 7


class Frozen(torch.autograd.Function):
    """Works out gradients only where all of them are asked for."""

    @staticmethod
    def forward(ctx: Any, x: T, w: T) -> T:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        (g,), (x, w) = gradients, ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return None, None
        return g * w, (g * x).sum(0)


def frozen(x: T, w: T) -> T:
    return Frozen.apply(x, w)


def test_a_frozen_weight_takes_no_gradient_from_the_others(examine: Any) -> None:
    """A gradient that is lost where another input is frozen is missing."""
    record = examine(frozen, lambda x, w: x * w, INPUTS, cases=60, grad=True)
    assert (record.failed_check, record.cause) == ("gradients", "gradient-missing"), record.message


def test_what_cancels_in_16_bits_may_have_what_float32_leaves(judge_one: Any) -> None:
    """Of ``g * sigmoid(40) - g`` 16 bits have 0 and a stable formula 4e-18; a factor on the gradient is found."""

    def stable(scale: float) -> Callable[[T], T]:
        class Fused(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: T) -> T:
                ctx.save_for_backward(x)
                return F.softplus(-x.float()).to(x.dtype)

            @staticmethod
            def backward(ctx: Any, g: T) -> T:
                (x,) = ctx.saved_tensors
                return (-scale * g.float() * torch.sigmoid(-x.float())).to(x.dtype)

        return Fused.apply  # type: ignore[no-any-return]

    def rising(shape: Any, dtype: torch.dtype, generator: torch.Generator) -> T:
        return torch.linspace(-4, 60, shape[0] * shape[1], dtype=dtype, device=generator.device).reshape(shape)

    inputs = {"x": tensor("rows hidden", values=rising)}
    case = Case({"rows": 4, "hidden": 8}, "bfloat16", {"x": TensorCase("bfloat16")}, seed=2)
    right, wrong = (
        judge_one(stable(scale), lambda x: -F.logsigmoid(-x) - x, inputs, grad=True, case=case) for scale in (1.0, 1.1)
    )

    assert right.failure is None
    assert wrong.failure is not None
    assert wrong.failure.check == "gradients"


def test_forward_is_judged_while_it_records_a_graph(judge_one: Any) -> None:
    """A training path with right gradients and wrong results fails; one that rounds otherwise is right."""

    class Training(torch.autograd.Function):
        off = 0.0

        @staticmethod
        def forward(_: Any, x: T) -> T:
            return x * 2 + Training.off

        @staticmethod
        def backward(_: Any, *gradients: T) -> Any:
            return gradients[0] * 2

    def fused(x: T) -> T:
        return Training.apply(x) if x.requires_grad else x * 2

    assert judge_one(fused, lambda x: x * 2, grad=True).failure is None
    Training.off = 0.5
    failure = judge_one(fused, lambda x: x * 2, grad=True).failure
    assert failure.identity.startswith("gradients:forward:values")
    assert judge_one(fused, lambda x: x * 2).failure is None
    exp = lambda x: torch.exp(x.double()).float() if x.requires_grad else torch.exp(x)  # noqa: E731
    assert judge_one(exp, torch.exp, grad=True).failure is None


@pytest.mark.parametrize(
    ("sought", "left_out"),
    [
        ("gradients:w:finite", True),
        ("gradients:x:nonfinite", True),
        ("gradients:again:w", True),
        (None, False),
    ],
)
def test_a_wrong_gradient_is_shrunk_without_what_comes_after_it(sought: str | None, left_out: bool) -> None:
    """A case that does not show it costs one backward, and a hazard its own step; others are looked for as ever."""
    spec = FusionSpec(fused=reference, reference=reference, inputs=INPUTS, dtypes="float32", grad=True)
    tensors = {name: TensorCase("float32") for name in INPUTS}
    case = Case({"rows": 5, "columns": 7}, "float32", tensors, seed=1)

    result = judge_case(Context(spec, torch.device("cpu"), complete=True, focus=Focus(sought=sought)), case)

    verdict = concluded(result, "gradients")
    assert verdict.status == "pass"
    assert ("second_derivative" not in verdict.facts) is left_out
