"""A row of today beside the stored one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pytest_fusion.bench.baseline.codec import Baseline
from pytest_fusion.bench.baseline.latency_judge import Noise
from pytest_fusion.bench.baseline.row import Row
from pytest_fusion.bench.baseline.row_compare import Comparison, compare, judged
from tests.bench.baseline.made import FACTS, PLACE, baseline, golden, latency, row

QUIET = Noise(0.0005)


def _verdict(now: Row, before: Row, machine: Noise | None = QUIET) -> Comparison:
    return judged([compare(now, baseline(before), machine=machine)])[0]


def test_the_same_row_is_the_same() -> None:
    """Nothing is wrong with a row that equals its baseline in facts, golden outputs and latency."""
    one = row(latency=latency(), golden=(golden(),))
    found = _verdict(one, one)

    assert (found.verdict, found.reason, found.failed) == ("same", "", False)
    assert found.latency is not None
    assert found.latency.verdict == "same"


def test_one_launch_more_fails_and_is_named() -> None:
    """The message has the fact, both values and the kernel that came."""
    found = _verdict(row({**FACTS, "launches.kernels": 2}, names={"rms": 1, "copy": 1}), row())

    assert (found.verdict, found.failed) == ("regressed", True)
    assert "launches.kernels 1 -> 2 (+100%)" in found.reason
    assert found.names == "more copy"


def test_a_worse_fact_names_versions_that_may_explain_it() -> None:
    """A compiler that is newer than the baseline stands beside the fact."""
    now = row({**FACTS, "sm_90/rms/spills": 16}, environment={"triton": "3.7.1"})

    assert "there was none; the baseline was made with triton 3.6.0, this is 3.7.1" in _verdict(now, row()).reason


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"launches.kernels": 0}, "improved"),
        ({"sm_90/rms/spills": 0, "sm_90/rms/registers": 3}, "unknown"),
        ({}, "same"),
    ],
)
def test_the_worst_part_is_the_verdict_of_a_row(change: Mapping[str, int], verdict: str) -> None:
    """Better is improved, a fact that the baseline lacks is unknown, and neither fails."""
    found = _verdict(row({**FACTS, **change}), row())

    assert (found.verdict, found.failed) == (verdict, False)


def test_a_run_that_measured_nothing_is_no_pass() -> None:
    """A row without facts beside a row without facts says nothing, and one beside facts is unknown."""
    nothing = row({}, names={})

    assert _verdict(nothing, nothing).verdict == "unknown"
    assert _verdict(nothing, row()).verdict == "unknown"


@pytest.mark.parametrize("stored", [None, baseline(row(case="other"))], ids=["no file", "no row"])
def test_a_missing_baseline_fails_where_nobody_can_make_one(stored: Baseline | None) -> None:
    """In CI it is a failure with the command that makes it; elsewhere it is new; a reference's row never fails."""
    in_ci = compare(row(), stored, ci=True, command="pytest t.py --fusion-bench --fusion-update new")
    at_home = compare(row(), stored)

    assert (in_ci.verdict, in_ci.failed, at_home.verdict, at_home.failed) == ("missing", True, "new", False)
    assert "make it with: pytest t.py --fusion-bench --fusion-update new, and commit the file" in in_ci.reason
    assert "--fusion-update new" in at_home.reason
    assert compare(row(role="reference"), stored, ci=True).verdict == "new"


def test_a_slower_kernel_fails_and_a_faster_one_suggests_an_update() -> None:
    """5 % beyond the stored ratio is called either way; the improvement names the mode that accepts it."""
    before = row(latency=latency(-0.7))
    slower, faster = (_verdict(row(latency=latency(-0.7 + step)), before) for step in (0.05, -0.05))

    assert (slower.verdict, slower.failed) == ("regressed", True)
    assert "latency: +5.13 %" in slower.reason
    assert (faster.verdict, faster.failed) == ("improved", False)
    assert "--fusion-update all" in faster.reason


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"place": {**PLACE, "gpu": "NVIDIA H100"}}, "GPU NVIDIA H200 there, NVIDIA H100 here"),
        ({"place": {**PLACE, "torch": "2.13"}}, "torch 2.11 there, 2.13 here"),
        ({"control": "other"}, "the reference is not the one of the baseline"),
        ({"method": {"timer": "events", "cache": "cold"}}, "timer graph then, events now"),
        ({"blocks": (0.0,) * 3}, "3 blocks were measured, and 8 are needed"),
    ],
)
def test_latencies_that_do_not_compare_get_no_verdict(change: dict[str, Any], said: str) -> None:
    """Another GPU, compiler, reference or timer is told; a ratio twice as high is not called slower."""
    found = _verdict(row(latency=replace(latency(0.0), **change)), row(latency=latency()))

    assert found.verdict in ("unknown", "inconclusive")
    assert said in found.reason


@pytest.mark.parametrize(
    ("now", "before", "machine", "said"),
    [
        (latency(), None, QUIET, "the baseline has no latency"),
        (None, latency(), QUIET, "this run measured none"),
        (latency(0.0), latency(), None, "not measured against itself"),
        (latency(0.0), latency(), Noise(0.1, "it is noisy"), "it is noisy"),
    ],
)
def test_too_little_to_judge_latency_is_no_pass(now: Any, before: Any, machine: Noise | None, said: str) -> None:
    """Without a stored latency, one of today, or a quiet machine, there is no verdict, with the reason."""
    found = _verdict(row(latency=now), row(latency=before), machine)

    assert (found.verdict in ("unknown", "inconclusive"), found.failed) == (True, False)
    assert said in found.reason


def test_the_latency_of_a_reference_is_never_judged() -> None:
    """It is the measure, so nothing is asked about it."""
    one = row(role="reference", latency=latency())

    assert compare(row(role="reference", latency=latency(0.5)), baseline(one), machine=QUIET).question is None


def test_the_more_cases_a_run_has_the_surer_it_must_be() -> None:
    """A slowdown that one question would call is inconclusive among a thousand."""
    now = replace(latency(-0.7 + 0.05), error=0.017, low=-0.69, high=-0.61)
    one = compare(row(latency=now), baseline(row(latency=latency())), machine=QUIET)

    assert judged([one])[0].verdict == "regressed"
    assert judged([one], family=1000)[0].verdict == "inconclusive"


def test_a_golden_output_that_changed_fails() -> None:
    """A drift within rounding is told and fails nothing; beyond it, who keeps golden outputs hears of it."""
    drift = golden(digest="sha256:bb", values=(1.0000001, 2.0, 3.0, 4.0))
    wrong = golden(digest="sha256:bb", values=(1.1, 2.0, 3.0, 4.0))
    found = [_verdict(row(golden=(now,)), row(golden=(golden(),))) for now in (golden(), drift, wrong)]

    assert [one.verdict for one in found] == ["same", "changed", "regressed"]
    assert "golden output out: sample 0 was 1 and is 1.1, where 1e-06 is allowed" in found[2].reason


TILE, DIVIDES = "rms: constexpr n 333 or 2048", "rms: divisibility by 16 of n"


@pytest.mark.parametrize(
    ("before", "now", "verdict", "said"),
    [
        ({DIVIDES: 1}, {DIVIDES: 1}, "same", ""),
        ({DIVIDES: 1}, {TILE: 1}, "changed", f"compiled again for other reasons: {DIVIDES} -> {TILE}"),
        ({DIVIDES: 1, TILE: 1}, {TILE: 2}, "changed", f"{DIVIDES} -> none"),
        ({}, {TILE: 1}, "same", ""),
    ],
)
def test_other_reasons_to_compile_again_are_told(
    before: Mapping[str, int], now: Mapping[str, int], verdict: str, said: str
) -> None:
    """As often as before is not as before; a baseline that kept no reasons has nothing to compare with."""
    found = _verdict(row({"recompiles": 2}, reasons=now, names={}), row({"recompiles": 2}, reasons=before, names={}))

    assert (found.verdict, found.failed) == (verdict, False)
    assert said in found.reason
    assert found.changes == ((("changed", found.reason),) if said else ())


def test_the_reason_stands_beside_one_compilation_more() -> None:
    """It is part of what regressed, not a second change."""
    found = _verdict(row({"recompiles": 1}, reasons={TILE: 1}), row({"recompiles": 0}))

    assert found.verdict == "regressed"
    assert f"recompiles 0 -> 1 (there was none); compiled again for other reasons: none -> {TILE}" in found.reason
    assert {verdict for verdict, _ in found.changes} == {"regressed"}


def test_what_changed_is_told_beside_a_worse_verdict() -> None:
    """A latency that nobody can judge hides neither a drift nor registers; counts of instructions come last."""
    then = row({"sm_90/rms/barriers": 1, "sm_90/rms/registers": 32}, latency=latency(), golden=(golden(),))
    now = replace(
        then,
        facts={"sm_90/rms/barriers": 2, "sm_90/rms/registers": 30},
        latency=latency(place={**PLACE, "driver": "590"}),
        golden=(golden(digest="sha256:bb"),),
        environment={"torch": "2.11.0", "triton": "3.7.1"},
    )
    found = _verdict(now, then)

    assert found.verdict == "unknown"
    assert [verdict for verdict, _ in found.changes] == ["changed", "unknown", "changed", "changed"]
    drift, _, *facts = (what for _, what in found.changes)
    assert drift.startswith("golden output out: a drift: its bits differ")
    assert facts == ["sm_90/rms/registers 32 -> 30", "sm_90/rms/barriers 1 -> 2"]
    assert found.context == "; the baseline was made with triton 3.6.0, this is 3.7.1"
