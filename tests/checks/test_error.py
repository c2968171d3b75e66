"""Check ``error``: what a kernel may raise, and what not."""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from pytest_fusion import dim, values
from pytest_fusion.errors import NotModelledError, SpecError
from pytest_fusion.spec.inputs import derived, tensor
from pytest_fusion.spec.promises import Tolerance


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_kernel_that_raises_fails_with_its_exception_and_place(examine: Any) -> None:
    """The record names the exception, the function that raised, the smallest case and ``rejects=``."""

    def fused(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] >= 3:
            torch.empty(2).view(7)
        return x * 2

    record = examine(fused, double)
    assert (record.verdict, record.failed_check, record.cause) == ("fail", "error", "raises")
    assert record.case is not None
    assert record.case["dims"] == {"rows": 3, "hidden": 0}
    assert "RuntimeError: shape '[7]' is invalid" in record.message
    assert "test_error.py:fused" in record.message
    assert "rejects=" in record.message


def test_a_declared_refusal_is_counted_and_forgiven(examine: Any) -> None:
    """Cases that raise a type of ``rejects`` are rejected by name, the others judged."""

    def fused(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] % 2:
            raise ValueError("odd width")
        return x * 2

    record = examine(fused, double, rejects=ValueError, cases=20)
    assert record.verdict == "pass"
    assert record.rejected["ValueError"] > 0
    assert record.checks["error"]["verdict"] == "pass"


def test_a_refusal_that_depends_on_the_values_is_forgiven_in_every_call(judge_one: Any) -> None:
    """Called again with changed values, a kernel may refuse those by what it declared."""
    calls = 0

    def fused(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise ValueError("not these values")
        return x * 2

    result = judge_one(fused, double, rejects=ValueError, again=True)
    assert calls > 3
    assert result.failure is None


def test_refusing_everything_is_a_failure_that_quotes_the_refusal(examine: Any) -> None:
    """A kernel that rejects every case has shown nothing; the message says what it said."""

    def fused(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("only on Tuesdays")

    record = examine(fused, double, rejects=NotImplementedError, cases=5)
    assert (record.verdict, record.failed_check) == ("fail", "error")
    assert "only on Tuesdays" in record.message
    assert "rejects=" in record.message


def raises_unless_empty(x: torch.Tensor) -> torch.Tensor:
    if x.numel():
        raise ValueError("not these")
    return x * 2


def test_empty_outputs_alone_are_no_evidence(examine: Any) -> None:
    """Where all else was rejected the test fails as if nothing had been judged: a wrong kernel would pass."""
    record = examine(lambda x: x * 3, raises_unless_empty, cases=20)
    assert (record.verdict, record.failed_check) == ("fail", "error")
    assert "of empty outputs alone" in record.message
    assert "reference ValueError" in record.message
    assert examine(raises_unless_empty, double, cases=20, rejects=ValueError).failed_check == "error"
    lane = examine(lambda x: lacks_a_model(x) if x.numel() else x * 2, double, cases=20)
    assert lane.verdict == "unknown"
    assert "inline assembly at k.py:3" in lane.message


def counts(x: torch.Tensor) -> int:
    return len(x)


def test_a_test_of_empty_outputs_is_unknown(examine: Any) -> None:
    """Sizes of nothing but 0 reject nothing; numbers that are no tensors are evidence."""
    dims = {"rows": dim(0, 0)}
    record = examine(lambda x: x * 3, double, cases=5, dims=dims)
    assert (record.verdict, record.failed_check) == ("unknown", None)
    assert "of empty outputs alone" in record.message
    assert examine(counts, counts, cases=5, dims=dims).verdict == "pass"


def lacks_a_model(x: torch.Tensor) -> torch.Tensor:
    """As a kernel in the CPU lane: the executor's error comes of the refusal, and the launcher's of that."""
    try:
        raise RuntimeError("InterpreterError") from NotModelledError("inline assembly at k.py:3 cannot run here")
    except RuntimeError:
        raise ValueError("the launch failed")  # noqa: B904


def test_what_the_lane_has_no_model_of_is_unknown(examine: Any) -> None:
    """No case was judged, which is no failure; the reason is told, and rejects= is not advised."""
    record = examine(lacks_a_model, double, cases=5)
    assert (record.verdict, record.failed_check) == ("unknown", None)
    assert "inline assembly at k.py:3" in record.message
    assert "rejects=" not in record.message
    assert record.checks["error"]["verdict"] == "unknown"
    assert record.rejected == {"not-modelled": 5}
    assert examine(double, lacks_a_model, cases=5).verdict == "unknown"


@pytest.mark.slow
def test_cases_without_a_model_beside_others_are_told(examine: Any) -> None:
    """The others decide; the check `error` is unknown with the reason and the number."""

    def fused(x: torch.Tensor, times: int = 2) -> torch.Tensor:
        return lacks_a_model(x) if x.shape[1] % 2 else x * times

    record = examine(fused, double, cases=20)
    assert record.verdict == "pass"
    error = record.checks["error"]
    assert error["verdict"] == "unknown"
    assert f"{record.rejected['not-modelled']} of 20 case(s)" in error["reason"]
    assert "inline assembly at k.py:3" in error["reason"]
    assert examine(lambda x: fused(x, 3), double, cases=20).failed_check == "values"


def test_a_reference_that_always_raises_is_a_failure_that_quotes_it(examine: Any) -> None:
    """A mistake in the reference is not taken for cases outside its domain."""
    record = examine(double, lambda x: x.no_such_method(), cases=5)
    assert (record.verdict, record.failed_check) == ("fail", "error")
    assert "no_such_method" in record.message
    assert "the reference itself raises" in record.message
    assert record.cause == "unexplained"


def test_a_reference_that_raises_on_some_sizes_asks_nothing_there(examine: Any) -> None:
    """Where the reference itself raises, the kernel may do anything, raising included."""

    def mean(x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            raise ValueError("the mean of nothing")
        return x.mean(-1)

    record = examine(mean, mean, cases=20)
    assert record.verdict == "pass"
    assert record.rejected["reference ValueError"] > 0


def test_an_input_function_that_raises_on_some_sizes_rejects_those(examine: Any) -> None:
    """A derived input outside its domain is a rejected case, neither a crash nor a finding."""
    inputs = {"x": tensor("n", values=values.positive()), "top": derived(lambda x: x.max())}
    record = examine(lambda x, top: x / top, lambda x, top: x / top, inputs, cases=20)
    assert record.verdict == "pass"
    assert record.rejected["inputs RuntimeError"] > 0


@pytest.mark.parametrize("where", ["derived", "values"])
def test_an_input_function_that_always_raises_is_an_error_of_the_spec(examine: Any, where: str) -> None:
    """The kernel was never called and is not accused: the function is, with what it says."""

    def raises(*_: Any) -> Any:
        raise IndexError("no such row")

    called: list[Any] = []
    inputs: dict[str, Any]
    if where == "derived":
        inputs = {"x": tensor("n", values=values.positive()), "top": derived(lambda x: [].pop())}
    else:
        inputs = {"x": tensor("n"), "top": tensor("n", values=raises)}
    with pytest.raises(SpecError, match=r"the kernel was never called.*'top' raised IndexError") as caught:
        examine(lambda x, top: called.append(x), lambda x, top: x, inputs, cases=20)
    assert not called
    assert "the kernel raises" not in str(caught.value)


def test_a_kernel_is_not_accused_of_what_comes_before_it(examine: Any) -> None:
    """Where an input's function refuses some cases and the reference all others, neither was the kernel."""

    def reference(x: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        raise ValueError("never")

    inputs = {"x": tensor("n", values=values.positive()), "top": derived(lambda x: x.max())}
    record = examine(lambda x, top: x / top, reference, inputs, cases=20)
    assert set(record.rejected) == {"inputs RuntimeError", "reference ValueError"}
    assert (record.verdict, record.cause) == ("fail", "unexplained")


@pytest.mark.parametrize(
    ("reference", "keywords", "part"),
    [
        (lambda x: torch.dropout(x, 0.5, True), {}, "consumes random numbers"),
        (lambda x: None, {}, "returned nothing to compare"),
        (lambda x: x.mul_(2), {}, "writes into its input 'x'"),
    ],
    ids=["random", "nothing", "in place"],
)
def test_a_reference_that_cannot_be_one_is_an_error_of_the_spec(
    judge_one: Any, reference: Any, keywords: dict[str, Any], part: str
) -> None:
    """Random, silent and in-place references raise ``SpecError`` with what to do instead."""
    for tolerance in ("auto", Tolerance(1e-3, 1e-3)):
        with pytest.raises(SpecError, match=part):
            judge_one(lambda x: None if part.startswith("returned") else x * 2, reference, tolerance=tolerance)


def projected(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """``x`` (rows, hidden) on four random directions."""
    return x @ torch.randn(x.shape[1], 4, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True])
def test_a_reference_that_seeds_its_generator_has_one_right_answer(examine: Any, grad: bool) -> None:
    """It was refused as random, told to use a seed, which it does; a kernel with another seed is wrong."""

    def seeded(x: torch.Tensor) -> torch.Tensor:
        return projected(x, torch.Generator().manual_seed(7))

    def other(x: torch.Tensor) -> torch.Tensor:
        return projected(x, torch.Generator().manual_seed(8))

    assert examine(seeded, seeded, cases=20, grad=grad).verdict == "pass"
    assert examine(other, seeded, cases=20, grad=grad).failed_check == "values"


def test_a_reference_whose_generator_goes_on_is_an_error_of_the_spec(judge_one: Any) -> None:
    """Its second call draws other numbers than its first, wherever the generator was seeded."""
    kept = torch.Generator().manual_seed(7)
    with pytest.raises(SpecError, match="a generator that goes on from call to call"):
        judge_one(lambda x: x @ torch.ones(7, 4), lambda x: projected(x, kept))


class Opaque:
    def __init__(self, out: torch.Tensor) -> None:
        self.parts = [out]


@pytest.mark.parametrize(
    ("result", "part"),
    [
        (
            lambda x: Opaque(x * 2),
            "is a Opaque, whose 'parts' holds tensors, which is not compared",
        ),
        (lambda x: (x * 2, Opaque(x)), r"out\[1\] of the reference is a Opaque"),
        (lambda x: object(), "out of the reference is a object, which is not compared; return tensors"),
        (lambda x: (y for y in [x * 2]), "is a generator, which is not compared"),
    ],
    ids=["held", "beside", "object", "generator"],
)
def test_an_object_that_nobody_looks_into_is_no_result(judge_one: Any, result: Any, part: str) -> None:
    """Two objects of one type passed for equal, whatever their tensors held."""
    with pytest.raises(SpecError, match=part):
        judge_one(result, result)


def test_an_object_beside_a_tensor_may_be_anything(judge_one: Any) -> None:
    """A context that holds no tensor is compared by its type alone, as ever."""
    assert judge_one(lambda x: (x * 2, object()), lambda x: (x * 2, object())).failure is None


def test_a_test_that_returns_nothing_is_told_apart_from_one_that_returns_a_tensor(examine: Any) -> None:
    """A forgotten ``return`` in the test shows as structure: None instead of a tensor."""
    record = examine(lambda x: None, double, cases=3)
    assert record.failed_check == "structure"
    assert "returned None, the reference tensor" in record.message


class OldName(UserWarning):
    """A library's own kind."""


@pytest.mark.parametrize(
    ("kind", "line"),
    [(UserWarning, "ignore::UserWarning"), (OldName, f"ignore::{OldName.__module__}.OldName")],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_warning_that_a_filter_raises_is_the_filters(
    judge_one: Any, kind: type[Warning], line: str, wrapped: bool
) -> None:
    """The message names what lets it pass, and no rejects=, also where the launcher's error came of it."""

    def fused(x: torch.Tensor) -> torch.Tensor:
        try:
            warnings.warn("use the new name", kind, stacklevel=1)
        except Warning as warning:
            if wrapped:
                raise RuntimeError("compilation failed") from warning
            raise
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        failure = judge_one(fused, double).failure
    assert failure.check == "error"
    assert f"-W {line}" in failure.reason
    assert "filterwarnings" in failure.reason
    assert "rejects=" not in failure.reason
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert judge_one(fused, double).failure is None


def test_a_warning_that_the_kernel_raises_itself_is_its_own(judge_one: Any) -> None:
    """Where no filter makes errors of its kind, one that ignores it would change nothing."""

    def fused(x: torch.Tensor) -> torch.Tensor:
        found = Future[torch.Tensor]()
        found.set_exception(UserWarning("not on this device"))
        return found.result()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        failure = judge_one(fused, double).failure
    assert "rejects=" in failure.reason


def test_a_reference_that_warns_is_told_of_the_filter(examine: Any) -> None:
    """Where it refuses every case by a warning, what is quoted of it says how to let it pass."""

    def warns(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("renamed", FutureWarning, stacklevel=1)
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record = examine(double, warns, cases=3)
    assert record.failed_check == "error"
    assert "-W ignore::FutureWarning" in record.message
