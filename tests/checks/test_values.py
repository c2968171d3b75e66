"""Check ``values``: the reference's own rounding, or a fixed tolerance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.checks import case_judge
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.context import Context
from pytest_fusion.checks.values_check import as_verdict
from pytest_fusion.checks.verdict import failed
from pytest_fusion.oracle.tolerance import ValuesVerdict
from pytest_fusion.oracle.tolerance.output_judge import excess_by
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor
from pytest_fusion.spec.promises import Tolerance
from tests.sweeps import sweep

T = torch.Tensor


def norm(x: T) -> T:
    f = x.float()
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


WRONG = {
    "no epsilon": lambda x: (x.float() / x.float().pow(2).mean(-1, keepdim=True).sqrt()).to(x.dtype),
    "a wrong tail": lambda x: torch.cat([norm(x)[..., :-1], x[..., -1:]], -1),
    "sum for mean": lambda x: (x.float() * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype),
}


@sweep("name", WRONG, fast=("a wrong tail",))
@pytest.mark.usefixtures("unexplained")
def test_a_wrong_kernel_fails(examine: Any, name: str) -> None:
    """A missing epsilon, an untouched last column and a forgotten division are found and shrunk."""
    record = examine(WRONG[name], norm, dtypes=["float32", "bfloat16"], cases=60)
    assert (record.verdict, record.failed_check, record.grade) == ("fail", "values", "D"), record.checks
    assert record.case is not None
    assert record.case["dims"]["rows"] <= 2
    assert record.case["dims"]["hidden"] <= 3


def test_an_honest_kernel_with_another_order_passes(examine: Any) -> None:
    """Summing in another order and dividing by the root instead of multiplying by its inverse is no error."""

    def fused(x: T) -> T:
        f = x.float().flip(-1)
        return (f / torch.sqrt(f.square().mean(-1, keepdim=True) + 1e-6)).flip(-1).to(x.dtype)

    record = examine(fused, norm, dtypes=["float32", "float16", "bfloat16"], cases=25)
    assert record.verdict == "pass", record.message
    assert record.grade in ("A", "B")
    assert record.worst["ratio"] <= 1


@pytest.mark.parametrize("dtype", "int32 int64 uint8 bool complex64 float8_e4m3fn float64".split())
def test_other_dtypes_are_compared_too(judge_one: Any, dtype: str) -> None:
    """Copies of integer, bool, complex and fp8 inputs pass, copies with one wrong element fail."""
    inputs = {"x": tensor("rows hidden", dtype=dtype)}
    case = Case({"rows": 5, "hidden": 7}, "float32", {"x": TensorCase(dtype)}, seed=1)

    def spoil(x: T) -> T:
        y = x.clone()
        one = torch.ones((), dtype=torch.int8).to(x.dtype)
        y[2, 3] = one * 0 if y[2, 3].tolist() == 1 else one
        return y

    assert judge_one(torch.clone, torch.clone, inputs, case=case).failure is None
    failure = judge_one(spoil, torch.clone, inputs, case=case).failure
    assert failure.check == "values"
    assert failure.facts["index"][:2] == [2, 3]


NAN = Case({"rows": 8, "hidden": 7}, "float32", {"x": TensorCase("float32", regime="nan")}, seed=1)
INF = NAN.with_tensor("x", regime="inf")
BOTH = INF.with_(seed=2)  # both infinities
PLAIN = NAN.with_tensor("x", regime="unit")


def doubled(x: T) -> T:
    return x * 2


NON_FINITE = {
    "NaN made": (lambda x: x / x, torch.ones_like, NAN, "values:out:nonfinite"),
    "NaN lost": (lambda x: x.nan_to_num() * 2, doubled, NAN, "nan-swallowed"),
    "infinity lost": (lambda x: x.clamp(-1e3, 1e3) * 2, doubled, INF, "nan-swallowed"),
    "infinity for NaN": (lambda x: x.nan_to_num(nan=torch.inf) * 2, doubled, NAN, "nan-swallowed"),
    "NaN for infinity": (lambda x: (x - x) + x * 2, doubled, INF, "made NaN"),
    "NaN for infinity of finite numbers": (lambda x: x / 0 * 0, lambda x: x / 0, PLAIN, "values:out:nonfinite"),
    "infinity of the other sign": (lambda x: torch.where(x.isinf(), -x, x) * 2, doubled, INF, "values:out:nonfinite"),
    "lost and made": (
        lambda x: torch.cat([x[:4].nan_to_num(), x[4:] * torch.nan]) * 2, doubled, NAN, "values:out:nonfinite"
    ),
    "lost, and a wrong number": (lambda x: (x.nan_to_num() + 1) * 2, doubled, NAN, "values:out:finite"),
    "as it is": (doubled, doubled, NAN, ""),
}  # fmt: skip


@pytest.mark.parametrize("tolerance", ["auto", Tolerance(rtol=1e-3)])
@pytest.mark.parametrize("name", NON_FINITE)
def test_nan_that_is_made_is_wrong_and_nan_that_is_lost_is_a_hazard(judge_one: Any, name: str, tolerance: Any) -> None:
    """Where both kinds occur in an output wrong wins; without what is lost the other elements are judged as ever."""
    fused, reference, case, expected = NON_FINITE[name]
    result = judge_one(fused, reference, case=case, tolerance=tolerance)
    found = [verdict.code for verdict in result.verdicts if verdict.status == "hazard"]
    if expected in ("nan-swallowed", "made NaN"):
        assert (result.failure, found) == (None, ["nan-swallowed"])
        (hazard,) = [verdict for verdict in result.verdicts if verdict.status == "hazard"]
        what = "lost the NaN or" if expected == "nan-swallowed" else "made NaN of the"
        assert f"element(s) {what} infinity that the reference has, the first at [" in hazard.reason
    else:
        assert (result.failure.identity if result.failure else "", found) == (expected, [])


def test_nan_is_no_worse_than_the_overflow_of_the_reference(judge_one: Any) -> None:
    """Two 16-bit results between that overflow are inf - inf. Exact arithmetic, which shows the overflow, is needed."""
    result = judge_one(lambda x: x * 1e38 * 1e9 * 0, lambda x: x * 1e38 * 1e9, case=PLAIN)
    assert result.failure is None
    assert "made NaN of the infinity" in next(v.reason for v in result.verdicts if v.code == "nan-swallowed")


def test_a_reference_that_overflows_is_the_one_to_mend(judge_one: Any) -> None:
    """The kernel is right and the reference is not: that is what the message has to say. A lost NaN is the kernel's."""
    overflowing = judge_one(lambda x: (x * 1e4).logsumexp(-1), lambda x: (x * 1e4).exp().sum(-1).log())
    lost = judge_one(NON_FINITE["NaN lost"][0], doubled, case=NAN)
    hint = "it is the reference that needs a stable form"
    assert [hint in v.reason for one in (overflowing, lost) for v in one.verdicts if v.code] == [True, False]


def test_a_hazard_of_values_goes_with_its_check(judge_one: Any) -> None:
    """``without={"values": ...}`` takes it out too, and no further call blames the same elements."""
    given = {"again": True, "deterministic": False, "without": {"values": "known"}}
    result = judge_one(lambda x: x.nan_to_num() * 2, doubled, case=NAN, **given)
    assert result.failure is None
    assert not [verdict for verdict in result.verdicts if verdict.status == "hazard"]
    given = {"again": True, "deterministic": False, "grad": True}
    assert judge_one(lambda x: x.nan_to_num() * 2, doubled, case=NAN, **given).failure is None


def test_a_fixed_tolerance_replaces_the_lanes(judge_one: Any) -> None:
    """One per mille off passes a tolerance of one per cent and fails one of a tenth of a per mille."""
    off = lambda x: x * 2.002  # noqa: E731
    double = lambda x: x * 2  # noqa: E731
    assert judge_one(off, double, tolerance=Tolerance(rtol=1e-2)).failure is None
    failure = judge_one(off, double, tolerance=Tolerance(rtol=1e-4)).failure
    assert "rtol=0.0001" in failure.reason


def test_the_error_map_of_a_fixed_tolerance_shows_what_is_beyond_it(examine: Any) -> None:
    """Elements within the tolerance are not drawn as wrong."""

    def fused(x: T) -> T:
        y = x * 1.001
        if x.shape[1] > 3:
            y[:, 3] += 5
        return y

    inputs = {"x": tensor("rows hidden", values=lambda s, d, g: torch.rand(s, generator=g).to(d) + 1)}
    record = examine(fused, torch.clone, inputs, tolerance=Tolerance(rtol=0.01), cases=20)
    assert record.failed_check == "values"
    assert "axis 1: index 3 of 4 (the last)" in record.message


def test_the_worst_output_is_reported() -> None:
    """Of several outputs the failing one with the largest ratio speaks; none at all passes."""

    def one(ok: bool, ratio: float) -> ValuesVerdict:
        return ValuesVerdict(ok, "A" if ok else "D", "max", ratio, (0,), 1.0, 2.0, 0.1, 1, 4, False, "off")

    verdict = as_verdict({"a": one(True, 0.9), "b": one(False, 1.5), "c": one(False, 3.0)})
    assert (verdict.status, verdict.identity) == ("fail", "values:c:finite")
    assert as_verdict({"a": one(True, 0.5), "b": one(True, 0.7)}).facts["output"] == "b"
    assert as_verdict({}).status == "pass"


@pytest.mark.slow
def test_the_picture_is_of_the_output_that_the_message_names(examine: Any) -> None:
    """Of two outputs the second is further off: its columns are drawn, not those of the first one that is wrong."""

    def fused(x: T) -> tuple[T, T]:
        first, second = x * 2, x.repeat(1, 2) * 3
        if x.shape[1] > 1:
            first[:, 0] *= 1.01
            second[:, -1] += 1000
        return first, second

    inputs = {"x": tensor("rows hidden", values=lambda s, d, g: torch.rand(s, generator=g).to(d) + 1)}
    record = examine(fused, lambda x: (x * 2, x.repeat(1, 2) * 3), inputs, dtypes="float32", cases=20)
    assert "out[1]: " in record.message
    assert "axis 1: index 3 of 4 (the last)" in record.message
    assert record.checks["values"]["error_map"]["caption"] == "errors of out[1]"


def test_a_statistical_suspicion_needs_fresh_values_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that rests on a statistic counts when two more cases repeat it before two do not; else it is noted."""
    spec = FusionSpec(fused=torch.neg, reference=torch.neg, inputs={"x": tensor("n")})
    context = Context(spec, torch.device("cpu"))
    case = Case({"n": 2}, "float32", {"x": TensorCase("float32")}, seed=5)
    answers: list[Any] = []

    def scripted(context: Any, case: Case, *, again: bool) -> Any:
        answer = answers.pop(0) if answers else None
        if isinstance(answer, str):
            return case_judge.CaseResult(case, rejected=answer)
        return case_judge.CaseResult(case, [answer] if answer is not None else [])

    monkeypatch.setattr(case_judge, "_judge", scripted)
    suspicion = failed("values", "rms", statistical=True)
    hard = failed("bounds", "wrote", identity="bounds:write:after")
    answers[:] = [suspicion, suspicion, suspicion]
    assert judge_case(context, case).failure is suspicion
    answers[:] = [suspicion, suspicion]
    assert judge_case(context, case).failure is None
    assert context.progress.unrepeated == 1
    answers[:] = [suspicion, None, suspicion, suspicion]
    assert judge_case(context, case).failure is suspicion
    answers[:] = [suspicion, "out-of-memory", suspicion, suspicion]
    assert judge_case(context, case).failure is suspicion
    answers[:] = [suspicion, suspicion, *["out-of-memory"] * 4]
    found = judge_case(context, case)
    assert [verdict.status for verdict in found.verdicts] == ["unknown"]
    assert context.progress.unrepeated == 1
    answers[:] = [suspicion, hard]
    found = judge_case(context, case)
    assert found.failure is hard
    assert found.case.seed != case.seed


class RoundedBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: T) -> T:
        (y,) = ctx.saved_tensors
        y = y.half().float()
        return y * (grad - (grad * y).sum(-1, keepdim=True))


@pytest.mark.parametrize(
    ("check", "fused"), [("values", lambda x: x.half().float().softmax(-1)), ("gradients", RoundedBack.apply)]
)
def test_a_picture_shows_what_the_text_says(check: str, fused: Any, judge_one: Any) -> None:
    """Both go by the lanes that told of the failure: by the few at first a text said 101 times, its picture 76.4."""
    result = judge_one(fused, lambda x: x.softmax(-1), grad=check == "gradients")

    verdict = result.failure
    assert verdict is not None
    assert verdict.check == check
    assert result.evidence is not None
    _, candidate, right = result.evidence
    share = excess_by(candidate, right, "auto")
    found = verdict.facts
    assert int((share > 1).sum()) == found["mismatched"]
    assert float(share[tuple(found["index"])]) == pytest.approx(
        abs(found["got"] - found["expected"]) / found["allowed"]
    )
