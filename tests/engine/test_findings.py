"""A test reports everything that it finds, each finding on its own smallest case, by level."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_fusion import FusionSpec, tensor
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.checks import registry
from pytest_fusion.checks.check import Check
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, failed, hazard, passed
from pytest_fusion.diagnosis.repro import replay_file
from pytest_fusion.engine import campaign, judging
from pytest_fusion.engine.cases import Chosen
from pytest_fusion.engine.crash import tally_of
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.modes import Replay
from pytest_fusion.engine.request import Request
from pytest_fusion.plugin.testing import examine
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run.process.fork import Crash

INPUTS = {"x": tensor("rows cols"), "w": tensor("cols")}


class Scaled(torch.autograd.Function):
    """``x * w`` with a wrong tail and without a gradient of ``w``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        y = x * w
        if x.shape[-1] % 4:
            y[..., -1] += 1
        return y

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (w,) = ctx.saved_tensors
        return upstream * w, None


def scaled(x: Tensor, w: Tensor) -> Any:
    return Scaled.apply(x, w)


def spec(fused: Any = lambda x, w: x * w, **keywords: Any) -> FusionSpec:
    return FusionSpec(fused=fused, reference=lambda x, w: x * w, inputs=INPUTS, name="scaled", **keywords)


def judged(tmp_path: Path, one: FusionSpec, **keywords: Any) -> TestRecord:
    return examine(one, isolate="off", root=tmp_path, **{"max_cases": 20, **keywords})


def codes(record: TestRecord) -> dict[str, str]:
    return {one["code"]: one["level"] for one in record.findings}


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first failure all other cases run, however slow the machine."""
    monkeypatch.setattr(campaign, "_MORE_SECONDS", 1e9)


@pytest.fixture
def waits() -> Iterator[None]:
    """A check that finds a hazard in wide cases."""

    def run(trial: Trial) -> Verdict:
        wide = trial.result.case.sizes["cols"] > 2
        return hazard("waits", "hidden-sync", "the call waits at line 7") if wide else passed("waits")

    registry.extend([Check("waits", run)])
    yield
    registry.extend([])


def test_two_faults_are_two_findings_each_on_its_own_smallest_case(tmp_path: Path, waits: None) -> None:
    """A wrong tail, a lost gradient and a hazard: one run has all, and the gradient's case has no tail."""
    record = judged(tmp_path, spec(scaled, grad=True))
    assert record.verdict == "fail"
    found = {one["check"]: one for one in reversed(record.findings)}
    assert {check: one["level"] for check, one in found.items()} == {
        "values": "wrong",
        "gradients": "wrong",
        "waits": "hazard",
    }
    cases = {check: one["case"]["dims"]["cols"] for check, one in found.items()}
    assert cases["gradients"] % 4 == 0 < cases["values"] % 4
    assert cases["waits"] == 3
    assert all(Path(tmp_path / one["replay"]).exists() or Path(one["replay"]).exists() for one in record.findings)
    assert "gradient-missing" in record.message
    assert "hidden-sync" in record.message


def test_what_a_known_failure_may_explain_is_no_finding(tmp_path: Path) -> None:
    """Where every result is wrong, what fails after it is listed and not blamed."""

    def add(trial: Trial) -> Verdict:
        wrong = any(verdict.failed for verdict in trial.result.verdicts)
        return failed("after", "differs as well") if wrong else passed("after")

    registry.extend([Check("after", add)])
    try:
        record = judged(tmp_path, spec(lambda x, w: x * w * 2 + 1, dtypes=torch.float32), max_cases=3)
    finally:
        registry.extend([])
    assert {one["check"] for one in record.findings} == {"values"}
    assert "after: differs as well" in record.message


def test_first_ends_the_test_there(tmp_path: Path) -> None:
    """``--fusion-first``: one finding, and no case after it."""
    wrong = spec(scaled, grad=True)
    first, every = (judged(tmp_path, wrong, first=one, max_cases=8) for one in (True, False))
    assert len(first.findings) == 1
    assert first.cases < every.cases


@pytest.mark.slow
def test_faults_of_one_kernel_do_not_hide_each_other_s_causes(tmp_path: Path) -> None:
    """A wrong tail, a lost gradient, an overwritten upstream gradient and 16-bit sums: each with its own cause."""

    class Faulty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
            ctx.save_for_backward(w)
            whole = x.shape[1] // 4 * 4
            total = torch.zeros(x.shape[0], dtype=x.dtype)
            for column in x.unbind(1):
                total = total + column
            return torch.cat([x[:, :whole] * w[:whole], x[:, whole:]], 1), total

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor) -> Any:
            (w,) = ctx.saved_tensors
            return upstream[0].mul_(w) + upstream[1][:, None], None

    faulty = FusionSpec(
        fused=Faulty.apply,
        reference=lambda x, w: (x * w, x.float().sum(1).to(x.dtype)),
        inputs=INPUTS,
        grad=True,
        rejects=RuntimeError,  # mul_ of an expanded upstream gradient
    )
    wrong = {one["code"] for one in judged(tmp_path, faulty, max_cases=60).findings if one["level"] == "wrong"}
    # What the wrong tail makes of infinities may be one more.
    assert wrong >= {"tail-mask", "gradient-missing", "upstream-overwritten", "low-precision-accumulation"}


def test_a_hazard_fails_no_test_unless_strict(tmp_path: Path, waits: None) -> None:
    """It is in the record of a test that passes; ``strict`` makes it the failure; ``allow`` accepts it there too."""
    lax, strict = judged(tmp_path, spec(), max_cases=8), judged(tmp_path, spec(strict=True), max_cases=8)
    allowed = judged(tmp_path, spec(strict=True, allow={"hidden-sync": "reads lengths"}), max_cases=8)
    assert (lax.verdict, codes(lax)) == ("pass", {"hidden-sync": "hazard"})
    assert lax.checks["waits"]["verdict"] == "pass"
    assert (strict.verdict, strict.failed_check, strict.cause) == ("fail", "waits", "hidden-sync")
    assert (allowed.verdict, allowed.findings[0]["allowed"]) == ("pass", "reads lengths")


def test_allow_accepts_one_cause_and_nothing_else(tmp_path: Path) -> None:
    """The accepted failure is in the record, its check passes, and another failure is found behind it."""
    lost = spec(scaled, grad=True, allow={"gradient-missing": "w is frozen"})
    record = judged(tmp_path, lost, max_cases=12)
    assert record.verdict == "fail"
    assert record.failed_check == "values"
    assert record.checks["gradients"]["verdict"] == "pass"
    detached = spec(lambda x, w: x * w.detach(), grad=True, allow={"gradient-missing": "w is frozen"})
    assert judged(tmp_path, detached, max_cases=12).verdict == "pass"


@pytest.mark.slow  # explains each finding twice
def test_a_replay_shows_its_own_finding(tmp_path: Path) -> None:
    """Of a case with two findings, the one that its file names comes first."""

    def fused(x: Tensor, w: Tensor) -> Tensor:
        out = x * w + 1
        x.zero_()
        return out

    record = judged(tmp_path, spec(fused), max_cases=8)
    assert {"values", "inputs"} <= {one["check"] for one in record.findings}
    files = [Path(one["replay"]) for one in record.findings if one["level"] == "wrong"]
    for stored in map(replay_file.read, files):
        job = Job(spec(fused), Request("t", isolate="off", root=tmp_path), searching.stand_in(), {})
        again = Replay(stored.case, stored.made, stored.check, stored.cause).run(job)
        assert again.failed_check == stored.check


def test_a_crash_keeps_what_was_found_before(tmp_path: Path) -> None:
    """The child's last note has its findings."""
    record = judged(tmp_path, spec(lambda x, w: (x * w).double()), max_cases=2)
    case = replay_file.read(next((tmp_path / ".fusion" / "failures").glob("*.json"))).case
    verdict = failed("values", "is off").as_json()
    note = {
        "case": case.as_json(),
        "cases": 9,
        "findings": [{"verdict": verdict, "cause": "x", "case": case.as_json()}],
    }
    job = Job(spec(), Request("t", isolate="off", root=tmp_path), searching.stand_in(), {})
    job = dataclasses.replace(job, only=case)
    tally = tally_of(job, Crash("signal", "SIGSEGV", note, ""))
    assert record.verdict == "fail"
    assert tally.failure is not None
    assert tally.failure.verdict.check == "crash"
    assert [one.verdict.check for one in tally.others] == ["values"]


def _less_accurate(fails: bool) -> campaign.Campaign:
    """A campaign after one case in bfloat16, whose factor that dtype's rounding excuses."""

    def fused(x: Tensor) -> Tensor:
        factor = 1 + 2.0**-7 if fails or x.dtype == torch.bfloat16 else 1
        return (x.float().sin() * 0.7 * factor).to(x.dtype)

    def outer() -> None: ...

    searching.adopt(outer, outer)
    spec = FusionSpec(fused=fused, reference=lambda x: x.sin() * 0.7, inputs={"x": tensor("rows hidden")})
    run = campaign.Campaign(spec, Request("test", seed=0), outer, {})
    case = run.cases.build({"dim rows": 8, "dim hidden": 40, "dtype": "bfloat16"}, 1).case
    assert case is not None
    result = run._run(Chosen(case))
    assert result is not None
    assert {verdict.code for verdict in result.findings} == {"less-accurate"}
    return run


@pytest.mark.parametrize("fails", [True, False])
def test_what_is_less_accurate_in_16_bits_runs_again_in_float32(fails: bool) -> None:
    """A factor that rounding to bfloat16 excuses is wrong there; one of bfloat16 alone is not."""
    assert _less_accurate(fails).judging.failing is fails


@pytest.mark.parametrize("slow", [True, False])
def test_a_hazard_of_a_slow_case_is_not_shrunk(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the case took longer than all smaller ones may: it fails no test."""
    monkeypatch.setattr(judging, "_HAZARD", -1.0 if slow else 1.0)
    (hazard,) = _less_accurate(fails=False).judging.found
    assert (hazard.shrink_runs == 0) is slow
    assert hazard.case is not None
