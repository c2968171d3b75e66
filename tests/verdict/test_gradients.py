"""Check ``gradients``: values, layouts of the upstream gradient, what is missing, what backward must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion.diagnosis.causes import likely_cause
from pytest_fusion.report.record import TestRecord
from pytest_fusion.spec.inputs import tensor
from pytest_fusion.verdict.upstream import Upstream

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
        "stale-state",
    ),
    "raises": (lambda y, w, g: (g.view(-1)[::2].reshape(g.shape), None), "error", "raises"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_backward_fails(examine: Any, name: str) -> None:
    """Each is caught, most by ``gradients``, with the cause where an experiment shows one."""
    backward, check, cause = WRONG[name]
    record: TestRecord = examine(kernel(backward), reference, INPUTS, cases=40, grad=True)
    assert (record.verdict, record.failed_check) == ("fail", check), record.message
    if cause is not None:
        assert record.cause == cause, record.message


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
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


def test_named_inputs_alone_are_asked_for(examine: Any) -> None:
    """``grad="x"``: a weight that gets no gradient is nobody's loss."""
    fused = kernel(lambda y, w, g: (right(y, w, g)[0], None))
    assert examine(fused, reference, INPUTS, cases=30, grad="x").verdict == "pass"
    assert examine(fused, reference, INPUTS, cases=30, grad=True).verdict == "fail"


def test_a_gradient_that_varies_may_be_declared(examine: Any) -> None:
    """A random order of additions fails ``repeat`` unless the gradient is named in ``deterministic=``."""

    def backward(y: T, w: T, g: T) -> tuple[Any, ...]:
        order = torch.randperm(len(g))
        total = torch.zeros_like(w)
        for row in order.tolist():
            total = total + (g * y)[row]
        return right(y, w, g)[0], total

    record = examine(kernel(backward), reference, INPUTS, cases=60, grad=True)
    assert (record.failed_check, record.cause) == ("repeat", "nondeterministic"), record.message
    record = examine(kernel(backward), reference, INPUTS, cases=60, grad=True, deterministic={"dw": False})
    assert record.verdict == "pass", record.message


def test_unknown_where_nobody_asks_or_nothing_can_be_differentiated(examine: Any) -> None:
    """Without ``grad=``, and with a reference that autograd cannot follow."""
    checks = examine(reference, reference, INPUTS).checks
    assert checks["gradients"]["verdict"] == "unknown"
    assert "not asked for" in checks["gradients"]["reason"]
    signs = examine(torch.no_grad()(reference), torch.no_grad()(reference), INPUTS, grad=True).checks["gradients"]
    assert signs["verdict"] == "unknown"
    assert "do not depend" in signs["reason"]


def test_every_upstream_layout_is_drawn(judge_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a few dozen seeds: expanded, zero, and every layout of a matrix."""
    from pytest_fusion.case.model import Case, TensorCase

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
        assert likely_cause(result.failure, case) is None if result.failure else True
    kinds = {kind for kind, _ in seen}
    layouts = {layout for kind, layout in seen if kind == "random"}
    assert kinds == {"random", "expanded", "negative", "zero"}
    assert layouts == {"contiguous", "transposed", "step", "padded"}
