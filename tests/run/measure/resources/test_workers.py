"""Compiling processes: what becomes of jobs when one hangs, dies, or says nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_fusion.run.measure.resources.targets import TARGETS
from pytest_fusion.run.process.compile_workers import Job, ask
from tests.sweeps import sweep

WORKER = """
import json, os, signal, sys, time
request = json.load(sys.stdin)
out = os.fdopen(int(sys.argv[1]), "w")
def say(**message):
    print(json.dumps(message), file=out, flush=True)
for job in request["jobs"]:
    say(begins=job["id"])
    if job["do"] == "leave":
        print("no such module", file=sys.stderr)
        sys.exit(3)
    say(begins=job["id"], kernel="k")
    if job["do"] == "hang":
        time.sleep(600)
    if job["do"] == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if job["do"] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    say(id=job["id"], target=request["target"], hidden=os.environ["CUDA_VISIBLE_DEVICES"],
        interpreted=os.environ.get("TRITON_INTERPRET"))
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A process that does as its jobs say."""
    path = tmp_path / "worker.py"
    path.write_text(WORKER, encoding="utf-8")
    return [sys.executable, str(path)]


def _jobs(*deeds: str, target: str = "sm_90") -> list[Job]:
    return [Job(number, TARGETS[target], {"do": deed}) for number, deed in enumerate(deeds)]


def test_each_job_is_answered_for_its_target(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of several targets come back by their ids, from processes without interpreter and without GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    jobs = [Job(7, TARGETS["sm_80"], {"do": "work"}), Job(9, TARGETS["sm_90"], {"do": "work"})]

    answers = ask(jobs, command=command, processes=2)

    assert {id_: dict(answer.found or {}) for id_, answer in answers.items()} == {
        7: {"target": "sm_80", "hidden": "", "interpreted": None},
        9: {"target": "sm_90", "hidden": "", "interpreted": None},
    }


@sweep(
    ("deed", "crashed", "said"),
    [("die", True, "died of SIGSEGV"), ("killed", False, "status -9"), ("hang", False, "within 1 s")],
    fast=2,
)
def test_a_lost_process_takes_one_job_with_it(command: list[str], deed: str, crashed: bool, said: str) -> None:
    """The kernel that it was lost on is told; only a crash of the compiler's own says anything about it."""
    answers = ask(_jobs("work", deed, "work"), command=command, processes=1, seconds=1.0)

    assert answers[0].found is not None
    assert answers[2].found is not None
    lost = answers[1]
    assert (lost.found, lost.crashed, lost.kernel) == (None, crashed, "k")
    assert said in lost.reason


def test_a_process_that_ends_between_kernels_accuses_none(command: list[str]) -> None:
    """What its module raised or a launcher did is the reason, with the last line it wrote; no kernel is named."""
    answers = ask(_jobs("leave", "work"), command=command, processes=1)

    assert (answers[0].crashed, answers[0].kernel) == (False, "")
    assert "status 3: no such module" in answers[0].reason
    assert answers[1].found is not None


def test_processes_that_cannot_start_end_the_question() -> None:
    """Every job is answered with the reason, none is asked for again for ever."""
    answers = ask(_jobs("work", "work"), command=[sys.executable, "-c", "raise SystemExit('no torch')"], processes=1)

    assert [answer.reason for answer in answers.values()] == ["the compiling process ended with status 1: no torch"] * 2
