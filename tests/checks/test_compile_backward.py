"""Check `compile`: with ``grad=`` the operators that a backward calls are tried as those of the forward are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion import interpreter
from pytest_fusion.case.choosing import search
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.modes import Judge
from pytest_fusion.engine.profiles import PROFILES
from pytest_fusion.engine.request import Request
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run.operators import logged
from pytest_fusion.spec import values
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler
interpreter.enable()
T = torch.Tensor
MATRIX = {"x": tensor("rows hidden")}


@pytest.fixture
def examined(tmp_path: Path) -> Callable[..., TestRecord]:
    """All checks on up to sixteen cases, with ``compile=True`` and ``grad=True``."""

    def judge(fused: Any, reference: Any, **keywords: Any) -> TestRecord:
        def outer() -> None: ...

        search.adopt(outer, outer)
        given = {"inputs": MATRIX, "dtypes": "float32", "compile": True, "grad": True, **keywords}
        spec = FusionSpec(fused=fused, reference=reference, **given)
        dev = PROFILES["dev"]
        request = Request("test", isolate="off", root=tmp_path, seed=0, max_cases=16, profile=dev, first=True)
        return Judge().run(Job(spec, request, outer, {}))

    return judge


def squared(x: T) -> T:
    return x * x


def right_fake(gradient: T, x: T) -> T:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def like_upstream(gradient: T, x: T) -> T:
    return torch.empty_like(gradient)


def of_float64(gradient: T, x: T) -> T:
    return right_fake(gradient, x).double()


def of_more_rows(gradient: T, x: T) -> T:
    return x.new_empty(x.shape[0] + 1, x.shape[1])


def honest(gradient: T, x: T) -> T:
    return (2 * gradient * x).contiguous()


def scribbling(gradient: T, x: T) -> T:
    made = honest(gradient, x)
    gradient.zero_()
    return made


def registered(name: str, backward: Callable[[T, T], T], fake: Callable[[T, T], T]) -> Callable[[T], T]:
    """``x * x`` by an operator whose autograd formula calls a second one, of this name."""
    first = torch.library.custom_op(f"fusion_backward_test::{name}", lambda x: (x * x).contiguous(), mutates_args=(),
                                    schema="(Tensor x) -> Tensor")  # fmt: skip
    second = torch.library.custom_op(f"fusion_backward_test::{name}_backward", backward, mutates_args=(),
                                     schema="(Tensor gradient, Tensor x) -> Tensor")  # fmt: skip
    first.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device))
    second.register_fake(fake)
    first.register_autograd(
        lambda ctx, gradient: second(gradient, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    def fused(x: T) -> T:
        return first(x)

    return fused


FAKES = {"shape": of_more_rows, "dtype": of_float64, "strides": like_upstream}


@pytest.mark.parametrize("what", FAKES)
def test_a_wrong_fake_of_a_backward_operator_is_found(examined: Any, what: str) -> None:
    """The forward's own operator is right; the failure names the one that its formula calls."""
    record = examined(registered(what, honest, FAKES[what]), squared)
    assert (record.verdict, record.failed_check, record.cause) == ("fail", "compile", "wrong-fake"), record.message
    assert f"fusion_backward_test::{what}_backward: its fake implementation returns {what}" in record.message


def test_an_undeclared_mutation_of_a_backward_operator_is_found(examined: Any) -> None:
    """Of a tensor that nobody else holds, so that `gradients` sees nothing; its schema says that it writes none."""
    fused = registered("scribbles", scribbling, right_fake)

    def copying(x: T) -> T:
        return fused(x) * 1

    record = examined(copying, squared)
    assert (record.failed_check, record.cause) == ("compile", "operator-contract"), record.message
    assert "fusion_backward_test::scribbles_backward" in record.message
    assert "test_schema" in record.message


def test_an_honest_backward_operator_passes(examined: Any) -> None:
    """It is among what the report says was tried."""
    record = examined(registered("honest", honest, right_fake), squared)
    check = record.checks["compile"]
    assert (record.verdict, check["verdict"]) == ("pass", "pass"), (record.message, check)
    assert "operator fusion_backward_test::honest_backward" in check["reason"]


@pytest.mark.slow
def test_without_gradients_no_backward_is_asked_for(examined: Any) -> None:
    """What ``grad=`` does not name is not run, so nothing is said of its operators."""
    record = examined(registered("unasked", honest, of_float64), squared, grad=False)
    check = record.checks["compile"]
    assert (record.verdict, check["verdict"]) == ("pass", "pass"), record.message
    assert "unasked_backward" not in check["reason"]


@torch.library.custom_op("fusion_backward_test::packed", mutates_args=())
def packed(gradient: T) -> T:
    return gradient.contiguous().to(torch.float8_e4m3fn)


@packed.register_fake
def _(gradient: T) -> T:
    return torch.empty(gradient.shape, dtype=torch.float8_e4m3fn, device=gradient.device)


@torch.library.custom_op("fusion_backward_test::unpacked", mutates_args=())
def unpacked(half: T) -> T:
    return half.contiguous().to(torch.float32)


@unpacked.register_fake
def _(half: T) -> T:
    return torch.empty(half.shape, dtype=torch.float32, device=half.device)


class Same(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: T) -> T:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: T) -> T:
        unpacked(packed(gradient))
        return gradient


@pytest.mark.slow
def test_what_opcheck_cannot_try_of_a_backward_operator_is_unknown(examined: Any) -> None:
    """It has no arithmetic for float8, in which this backward keeps its gradients for a moment."""
    record = examined(Same.apply, lambda x: x.clone(), inputs={"x": tensor("rows hidden", values=values.normal(0, 1))})
    check = record.checks["compile"]
    assert record.verdict == "pass", record.message
    assert check["verdict"] == "unknown"
    assert "cannot try a tensor float8_e4m3fn" in check["reason"]


@pytest.mark.slow
def test_a_reference_that_cannot_be_differentiated_leaves_it_unknown(examined: Any) -> None:
    """Without its graph no upstream gradient is made, and the operators of backward are not reached."""
    record = examined(registered("detached", honest, of_float64), lambda x: squared(x.detach()))
    check = record.checks["compile"]
    assert check["verdict"] == "unknown"
    assert "the operators of a backward could not be tried" in check["reason"]


@torch.library.custom_op("fusion_backward_test::clears", mutates_args=("x",))
def clears(x: T) -> None:
    x.zero_()


def test_arguments_are_kept_as_they_were_before_the_call() -> None:
    """An operator that writes its argument is tried on the values that it was called with."""
    x = torch.ones(2, requires_grad=True)
    with logged() as log, torch.no_grad():
        clears(x)
    (call,) = log.calls.values()
    call.restore()
    assert torch.equal(call.args[0], torch.ones(2))
    assert not call.args[0].requires_grad
