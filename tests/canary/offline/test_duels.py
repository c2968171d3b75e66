"""Two kernels of one spec on the same cases: what each pair of them comes to."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion import canary
from pytest_fusion.canary.offline import comparison_mode
from pytest_fusion.canary.offline.kernel import contract, held_to
from pytest_fusion.canary.recording.recordings import Cases, RecordedCase
from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.engine.request import Pinned
from pytest_fusion.errors import SpecError
from pytest_fusion.spec.dims import dim
from pytest_fusion.spec.promises import Tolerance
from tests.canary.offline import kernels
from tests.canary.offline.conftest import Duels

pytestmark = pytest.mark.usefixtures("tmp_path")


def metric(record: Any, name: str) -> dict[str, Any]:
    (found,) = [one for one in record.canary["metrics"] if one["metric"] == name]
    return dict(found)


def test_an_equal_kernel_is_promoted(duel: Duels) -> None:
    """A kernel that goes another way to the same numbers passes all cases, and is promoted."""
    record = duel(kernels.another, kernels.right)
    assert (record.canary["verdict"], record.verdict, record.canary["reasons"]) == (
        "promote",
        "pass",
        [f"no worse in {record.canary['counts']['passes']} cases that both pass"],
    )
    assert record.canary["counts"]["passes"] >= 20
    assert metric(record, "error")["status"] == "pass"


def test_a_wrong_kernel_is_rolled_back_with_its_case(duel: Duels, tmp_path: Path) -> None:
    """The case that only the candidate fails is shrunk, explained, and written as a replay file."""
    record = duel(kernels.wrong_alone, kernels.right)
    assert (record.canary["verdict"], record.verdict, record.failed_check) == ("rollback", "fail", "values")
    assert "canary rollback, against tests.canary.offline.kernels:right" in record.message
    assert record.replay is not None
    written = json.loads((tmp_path / record.replay).read_text())
    assert (written["check"], written["case"]["dims"]["hidden"]) == ("values", 1)
    worse = [pair for pair in record.canary["pairs"] if pair["standing"] == "worse"]
    assert worse[0]["incumbent"]["verdict"] == "pass"
    assert worse[0]["case"]["dims"]["hidden"] == 1


@pytest.mark.slow
def test_what_both_fail_alike_is_not_blamed(duel: Duels) -> None:
    """KNOWN_BAD cases are counted and told, and the rest decides."""
    record = duel(kernels.wrong_alone, kernels.wrong_alone)
    assert (record.canary["verdict"], record.canary["counts"]["known-bad"] > 0) == ("promote", True)
    assert "KNOWN_BAD" in metric(record, "verdicts")["words"]
    assert record.replay is None


@pytest.mark.slow
def test_what_both_fail_by_far_more_is_held(duel: Duels) -> None:
    """A bug of the incumbent does not hide a larger one of the same check."""
    record = duel(kernels.far_wrong_alone, kernels.wrong_alone)
    assert (record.canary["verdict"], record.verdict) == ("hold", "pass")
    assert "both fail" in record.canary["reasons"][0]
    assert "the candidate by" in record.canary["reasons"][0]


@pytest.mark.slow
def test_a_better_kernel_is_promoted(duel: Duels) -> None:
    """A kernel that passes what the incumbent fails is better, and the incumbent's failures are told."""
    record = duel(kernels.right, kernels.wrong_alone)
    assert record.canary["verdict"] == "promote"
    assert metric(record, "verdicts")["status"] == "better"
    assert record.canary["counts"]["better"] == -metric(record, "verdicts")["value"]


@pytest.mark.slow
def test_nothing_is_said_beside_an_incumbent_that_always_fails(duel: Duels) -> None:
    """An incumbent that passes nothing is nothing to compare with, however good the candidate is."""
    record = duel(kernels.right, kernels.wrong)
    assert (record.canary["verdict"], record.verdict) == ("nodata", "unknown")
    assert "the candidate alone passes" in record.canary["reasons"][0]


@pytest.mark.slow
def test_few_cases_are_no_data(duel: Duels) -> None:
    """Six cases promote nobody."""
    record = duel(kernels.right, kernels.right, cases=6)
    assert (record.canary["verdict"], record.verdict) == ("nodata", "unknown")
    assert "20 are needed" in record.message


@pytest.mark.slow
def test_a_kernel_that_is_less_accurate_is_held(duel: Duels) -> None:
    """Errors within tolerance, but shown to be larger than the incumbent's by more than a quarter, are not promoted."""
    record = duel(kernels.careless, kernels.right)
    assert record.canary["verdict"] == "hold", record.canary["reasons"]
    assert metric(record, "error")["status"] == "worse"
    assert duel(kernels.right, kernels.careless).canary["verdict"] == "promote"


@pytest.mark.slow
def test_new_refusals_are_held(duel: Duels) -> None:
    """A case that the candidate alone refuses as `rejects=` allows is no failure, and is not promoted either."""
    record = duel(kernels.refuses_alone, kernels.right, rejects=NotImplementedError)
    assert (record.canary["verdict"], metric(record, "refusals")["status"]) == ("hold", "worse")
    back = duel(kernels.right, kernels.refuses_alone, rejects=NotImplementedError)
    assert (back.canary["verdict"], metric(back, "refusals")["status"]) == ("promote", "better")


@pytest.mark.slow
def test_wrong_results_in_place_of_refusals_roll_back(duel: Duels) -> None:
    """What the incumbent refuses can be served by something else; a wrong result is used."""
    record = duel(kernels.wrong_alone, kernels.refuses_alone, rejects=NotImplementedError)
    assert (record.canary["verdict"], record.verdict) == ("rollback", "fail")
    assert "the incumbent refuses" in record.canary["reasons"][0]


@pytest.mark.slow
def test_new_chance_is_held_where_it_is_allowed(duel: Duels) -> None:
    """An output that varies is a failure, or with `deterministic=False` worse than one that does not."""
    record = duel(kernels.varies, kernels.right, deterministic=False)
    assert record.canary["verdict"] == "hold", record.canary["reasons"]
    assert metric(record, "determinism")["status"] == "worse"
    same = duel(kernels.varies, kernels.varies, deterministic=False)
    assert metric(same, "determinism")["status"] == "pass"


@pytest.mark.slow
def test_more_launches_roll_back(duel: Duels) -> None:
    """One launch more for the same case is told with its numbers, its kernel and its case; fewer are better."""
    without = ("memory", "latency", "spills")
    record = duel(kernels.launched_twice, kernels.launched, without=without)
    assert (record.canary["verdict"], record.verdict) == ("rollback", "fail"), record.canary["reasons"]
    assert "launches 2 kernels where the incumbent launches 1" in record.canary["reasons"][0]
    assert "more kernel_1" in record.canary["reasons"][0]
    back = duel(kernels.launched, kernels.launched_twice, without=without)
    assert (back.canary["verdict"], metric(back, "launches")["status"]) == ("promote", "better")


@pytest.mark.slow
def test_launches_that_nobody_saw_are_no_data(duel: Duels) -> None:
    """Without a Triton launch on the CPU lane, what runs may be a path for the CPU, and nothing is promoted for it."""
    record = duel(kernels.right, kernels.right, without=("memory", "latency"))
    assert (record.canary["verdict"], metric(record, "launches")["status"]) == ("hold", "nodata")


@pytest.mark.slow
def test_what_was_not_measured_is_held(duel: Duels) -> None:
    """On the CPU there is no latency and no peak memory, and whoever did not leave them out is not promoted."""
    record = duel(kernels.right, kernels.right, without=("launches",))
    assert (record.canary["verdict"], record.verdict) == ("hold", "pass")
    assert [one.partition(":")[0] for one in record.canary["reasons"]] == [
        "peak memory was not measured",
        "latency was not measured",
    ]


@pytest.mark.slow
def test_pinned_and_recorded_cases(duel: Duels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are compared besides the generated ones, and a rollback may come of them alone."""
    case = Case({"rows": 3, "hidden": 1}, "float32", {"x": TensorCase("float32")}, seed=5)
    generated = {"dims": {"rows": dim(1, 20), "hidden": dim(1, 40)}}
    traffic = Cases("double", [RecordedCase(case, 7.0, "x", ())], 9, {"x is no tensor": 2.0}, {})
    monkeypatch.setattr(comparison_mode, "recorded", lambda path, spec: traffic)
    record = duel(kernels.wrong_alone, kernels.wrong_alone, recording=tmp_path, pinned=[Pinned("a", case)], **generated)
    sources = [pair["source"] for pair in record.canary["pairs"] if pair["standing"] == "known-bad"]
    assert {"pinned", "recorded"} <= set(sources)
    assert "no case for 2 calls: x is no tensor" in record.canary["notes"]
    back = duel(kernels.wrong_alone, kernels.right, pinned=[Pinned("a", case)], cases=1)
    assert (back.canary["verdict"], back.canary["pairs"][0]["source"]) == ("rollback", "pinned")


def test_what_was_recorded_is_compared(duel: Duels, tmp_path: Path) -> None:
    """Calls of a recorded function are cases of both kernels, in the sizes that they had."""
    recorder = canary.record("double", lambda x: x * 2, tmp_path)
    for _ in range(3):
        recorder(torch.ones(3, 17))
    recorder.close()
    record = duel(kernels.wrong_alone, kernels.wrong_alone, recording=tmp_path, cases=1)
    assert any(note.startswith("double: 3 calls in 1 files") for note in record.canary["notes"])
    sources = {pair["source"] for pair in record.canary["pairs"] if "rows=3" in pair["text"]}
    assert "recorded" in sources, record.canary["pairs"]


def test_a_recording_that_cannot_be_read_is_an_error(duel: Duels, tmp_path: Path) -> None:
    """Nothing is promoted on what it does not hold."""
    record = duel(kernels.right, kernels.right, recording=tmp_path / "missing.jsonl")
    assert (record.canary["verdict"], record.verdict) == ("error", "fail")
    assert "--recording" in record.message


def test_the_contract_travels() -> None:
    """What is asked of a kernel today is asked of one whose own spec asked for less, or for something else."""
    asked = kernels.SPEC.with_(
        grad=("x",),
        deterministic={"out": False},
        max_launches=1,
        tolerance=Tolerance(1e-3, 1e-4),
        without={"bounds": "no"},
    )
    held = held_to(kernels.SPEC, json.loads(json.dumps(contract(asked))))
    assert held == asked
    assert held_to(asked, json.loads(json.dumps(contract(kernels.SPEC)))) == kernels.SPEC
    with pytest.raises(SpecError):
        held_to(kernels.SPEC, {**contract(asked), "mutates": ["y"]})


def test_a_function_that_takes_other_inputs_is_no_incumbent(duel: Duels) -> None:
    """It has nothing to say of this spec, which the verdict tells."""
    record = duel(kernels.right, kernels.other_inputs)
    assert (record.canary["verdict"], record.verdict) == ("nodata", "unknown")
    assert "does not take the inputs of this test" in record.canary["reasons"][0]


@pytest.mark.slow
def test_a_test_that_could_not_fail_is_an_error(duel: Duels) -> None:
    """Two kernels that agree about zeros say nothing; the canary says that."""
    record = duel(zeros, kernels.right, reference=zeros)
    assert record.canary["verdict"] in ("error", "nodata"), record.canary
    assert record.verdict != "pass"


def zeros(x: Any) -> Any:
    return x * 0


@pytest.mark.slow
def test_a_candidate_that_dies_is_rolled_back(duel: Duels) -> None:
    """A candidate that ends its process, where the incumbent ends well, is rolled back with that case."""
    record = duel(kernels.dies_alone, kernels.right, isolate="on")
    assert (record.canary["verdict"], record.failed_check) == ("rollback", "crash"), record.canary["reasons"]
    assert record.replay is not None


@pytest.mark.slow
def test_an_incumbent_that_dies_is_not_the_candidates_fault(duel: Duels) -> None:
    """Cases in which the incumbent ends the process count for the candidate, and the others go on."""
    record = duel(kernels.right, kernels.dies_alone, isolate="on", dims={"rows": 3, "hidden": 1}, cases=3)
    assert record.canary["verdict"] in ("nodata", "error"), record.canary["reasons"]
    assert record.replay is None


def test_a_process_that_ends_while_costs_are_measured_blames_nobody(
    duel: Duels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All cases were judged by then, and neither kernel has failed one: an error, with what helps."""

    def dies(self: Any, seen: Any, duel: Any, sized: Any, lacking: str) -> Any:
        duel.compiling(Case({"rows": 1, "hidden": 1}, "float32", {"x": TensorCase("float32")}))
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(comparison_mode._InChildren, "_spills", dies)
    record = duel(kernels.right, kernels.another, isolate="on", cases=3)
    assert (record.canary["verdict"], record.verdict) == ("error", "fail"), record.canary["reasons"]
    assert "leave out latency,spills" in record.canary["reasons"][0]
