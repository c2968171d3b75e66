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


def first_gradient(t: T) -> T:
    t.mul_(2)
    return t


WRONG: dict[str, tuple[Callable[[T, T, T], tuple[Any, ...]], str, str | None]] = {
    "ignores the layout": (lambda y, w, g: right(y, w, flat(g)), "gradients", "gradient-layout"),
    "half of it": (lambda y, w, g: (right(y, w, g)[0] / 2, right(y, w, g)[1]), "gradients", "gradient-scale"),
    "none for the weight": (lambda y, w, g: (right(y, w, g)[0], None), "gradients", "gradient-missing"),
    "a term forgotten": (lambda y, w, g: (g * w, (g * y).sum(0)), "gradients", None),
    "the last row left out": (lambda y, w, g: (right(y, w, g)[0], (g * y)[:-1].sum(0)), "gradients", None),
    "writes the upstream gradient": (
        lambda y, w, g: (right(y, w, g), g.view(-1)[:1].zero_() if g.is_contiguous() else None)[0],
        "gradients",
        "mutates-input",
    ),
    "overwrites what it saved": (
        lambda y, w, g: (right(y, w, g), y.data.mul_(0.5))[0],
        "gradients",
        "mutates-input",
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
    record = examine(fused, reference, INPUTS, cases=60, grad=True, dtypes=dtype)
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


def tanh(x: T) -> T:
    return torch.tanh(x)


def of_x(function: Any) -> Callable[[T], Any]:
    """By position: torch 2.11 takes no names in ``apply``."""

    def fused(x: T) -> Any:
        return function.apply(x)

    return fused


def test_a_frozen_weight_takes_no_gradient_from_the_others(examine: Any) -> None:
    """A gradient that is lost where another input is frozen is missing."""
    record = examine(frozen, lambda x, w: x * w, INPUTS, cases=60, grad=True)
    assert (record.failed_check, record.cause) == ("gradients", "gradient-missing"), record.message


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


@pytest.mark.parametrize(
    ("spoil", "identity", "words"),
    [
        ("own", "gradients:again:dx", "ctx.own"),
        ("result", "gradients:output:out", "its caller still holds"),
        ("buffer", "gradients:again:dx", "second backward"),
    ],
)
def test_what_backward_spoils_is_named(
    judge_one: Any, monkeypatch: pytest.MonkeyPatch, spoil: str, identity: str, words: str
) -> None:
    """What it had saved shows in a second backward, whether or not the case asks for one; its result at once."""
    monkeypatch.setattr(Keeping, "spoil", spoil)
    results = [judge_one(of_x(Keeping), torch.tanh, grad=True, case=case) for case in plain_cases(8)]
    found = [result.failure for result in results if result.failure is not None]
    marks = [result.differs for result in results if result.failure is not None]
    assert all(differs is not None and bool(differs[1].any()) for differs in marks), "for a picture of where"
    assert found
    assert {failure.identity for failure in found} == {identity}
    assert words in found[0].reason
    if spoil == "own":
        assert len(found) >= 6, "but where the upstream gradient is zero"


@pytest.mark.slow
def test_a_buffer_that_is_used_up_may_be_refused_a_second_time(judge_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only backward itself sees it may overwrite if a second backward then says so."""
    for spoil in ("own, once", ""):
        monkeypatch.setattr(Keeping, "spoil", spoil)
        for case in plain_cases(8):
            assert judge_one(of_x(Keeping), torch.tanh, grad=True, case=case).failure is None


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


def plain_cases(count: int) -> list[Case]:
    sizes = {"rows": 3, "hidden": 4}
    return [Case(sizes, "float32", {"x": TensorCase("float32")}, seed=seed) for seed in range(count)]


def test_a_returned_gradient_that_the_next_backward_overwrites_fails(judge_one: Any) -> None:
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
    found = [judge_one(of_x(Late), lambda x: x * 3, grad=True, case=c).failure for c in plain_cases(8)]
    assert {f.identity for f in found if f is not None} == {"gradients:overwritten:x"}


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
def test_one_of_several_outputs_may_be_used_alone(judge_one: Any) -> None:
    """A backward that needs the gradient of every output fails where the others have none."""

    class Pair(torch.autograd.Function):
        whole = True

        @staticmethod
        def forward(ctx: Any, x: T) -> Any:
            ctx.set_materialize_grads(False)
            return x * 2, x * 3

        @staticmethod
        def backward(_: Any, *gradients: T) -> Any:
            a, b = gradients
            if Pair.whole or (a is not None and b is not None):
                return a * 2 + b * 3
            return a * 2 if a is not None else b * 3

    two = lambda x: (x * 2, x * 3)  # noqa: E731
    failures = [judge_one(of_x(Pair), two, grad=True, case=case).failure for case in plain_cases(12)]
    assert {f.check for f in failures if f is not None} == {"error"}
    Pair.whole = False
    for case in plain_cases(12):
        assert judge_one(of_x(Pair), two, grad=True, case=case).failure is None


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


@pytest.mark.parametrize(
    ("sought", "left_out"),
    [("gradients:w:finite", True), ("gradients:x:nonfinite", True), ("gradients:again:w", False), (None, False)],
)
def test_a_wrong_gradient_is_shrunk_without_what_comes_after_it(sought: str | None, left_out: bool) -> None:
    """A case that does not show it costs one backward; any other failure is looked for as ever."""
    spec = FusionSpec(fused=reference, reference=reference, inputs=INPUTS, dtypes="float32", grad=True)
    tensors = {name: TensorCase("float32") for name in INPUTS}
    case = Case({"rows": 5, "columns": 7}, "float32", tensors, seed=1)

    result = judge_case(Context(spec, torch.device("cpu"), complete=True, focus=Focus(sought=sought)), case)

    verdict = concluded(result, "gradients")
    assert verdict.status == "pass"
    assert ("second_derivative" not in verdict.facts) is left_out
