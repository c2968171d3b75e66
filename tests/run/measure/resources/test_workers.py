"""Compiling processes: what becomes of jobs when one hangs, dies, or says nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_fusion.run.measure.resources.targets import TARGETS
from pytest_fusion.run.process import compile_jobs
from pytest_fusion.run.process.compile_jobs import Job, compile_all
from tests.run.process.children import LINUX, alive
from tests.run.process.waiting import eventually
from tests.sweeps import sweep

WORKER = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from pytest_fusion.run.process.compile_jobs import serve

def work(request, progress):
    for job in request["jobs"]:
        progress({{"begins": job["id"]}})
        print("to standard output")
        if job["do"] == "leave":
            print("no such module", file=sys.stderr)
            sys.exit(3)
        if job["do"] == "raise":
            raise ValueError("it is raised")
        progress({{"begins": job["id"], "kernel": "k"}})
        if job["do"] == "hang":
            time.sleep(600)
        if os.path.isdir(job["do"]):
            open(job["do"] + "/pids", "w").write(f"{{os.getppid()}} {{os.getpid()}} ")
            time.sleep(600)
        if job["do"] == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if job["do"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if job["do"] == "kill the parent":
            time.sleep(0.5)  # the parent passes the answer to the job before on
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        found = dict(target=request["target"], hidden=os.environ["CUDA_VISIBLE_DEVICES"],
                     interpreted=os.environ.get("TRITON_INTERPRET"))
        if job["do"] == "tell":
            found = dict(worker=os.getppid(), process=os.getpid(), group=os.getpgid(0))
        progress({{"id": job["id"], "found": found}})

serve(*sys.argv[1:], work)
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[list[str]]:
    """A worker whose processes do as their jobs say."""
    path = tmp_path / "worker.py"
    path.write_text(WORKER.format(root=str(Path(__file__).parents[4])), encoding="utf-8")
    yield [sys.executable, str(path)]
    compile_jobs._stop_worker()


@pytest.fixture(autouse=True)
def no_worker() -> None:
    """One that another test has started would answer for the one of this test."""
    compile_jobs._stop_worker()


def _jobs(*deeds: str, target: str = "sm_90") -> list[Job]:
    return [Job(number, TARGETS[target], {"do": deed}) for number, deed in enumerate(deeds)]


def test_each_job_is_answered_for_its_target(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of several targets come back by their ids, from processes without interpreter and without GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    jobs = [Job(7, TARGETS["sm_80"], {"do": "work"}), Job(9, TARGETS["sm_90"], {"do": "work"})]

    answers = compile_all(jobs, command=command, processes=2)

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
    answers = compile_all(_jobs("work", deed, "work"), command=command, processes=1, seconds=1.0)

    assert answers[0].found is not None
    assert answers[2].found is not None
    lost = answers[1]
    assert (lost.found, lost.crashed, lost.kernel) == (None, crashed, "k")
    assert said in lost.reason


@pytest.mark.parametrize(
    ("deed", "said"), [("leave", "status 3: no such module"), ("raise", "status 1: ValueError: it is raised")]
)
def test_a_process_that_ends_between_kernels_accuses_none(command: list[str], deed: str, said: str) -> None:
    """What its module raised or a launcher did is the reason, with the last line it wrote; no kernel is named."""
    answers = compile_all(_jobs(deed, "work"), command=command, processes=1)

    assert (answers[0].crashed, answers[0].kernel) == (False, "")
    assert said in answers[0].reason
    assert answers[1].found is not None


def test_processes_that_cannot_start_end_the_question() -> None:
    """Every job is answered with the reason, none is asked for again for ever."""
    answers = compile_all(
        _jobs("work", "work"), command=[sys.executable, "-c", "raise SystemExit('no torch')"], processes=1
    )

    assert [answer.reason for answer in answers.values()] == ["the compiling process ended with status 1: no torch"] * 2


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_one_worker_forks_all_processes(command: list[str]) -> None:
    """Several at once and call after call, each in a group of its own; none of them is left when the worker stops."""
    found = [
        dict(answer.found or {})
        for _ in range(2)
        for answer in compile_all(_jobs("tell", "tell"), command=command, processes=2).values()
    ]
    assert len({one["worker"] for one in found}) == 1
    assert len({one["process"] for one in found}) == 4
    assert all(one["process"] == one["group"] for one in found)
    compile_jobs._stop_worker()
    assert eventually(lambda: not alive(found[0]["worker"]))


def test_a_worker_that_is_killed_is_replaced_once(command: list[str]) -> None:
    """Jobs answered before stay answered; those that kill each worker get a reason."""
    answers = compile_all(_jobs("work", "kill the parent"), command=command, processes=1)

    assert answers[0].found is not None
    assert answers[1].found is None
    assert "status -9" in answers[1].reason


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_nothing_outlives_the_process_that_has_jobs_compiled(command: list[str], tmp_path: Path) -> None:
    """Where it is killed, its worker ends at once, and with it what compiles."""
    program = f"""
from pytest_fusion.run.measure.resources.targets import TARGETS
from pytest_fusion.run.process.compile_jobs import Job, compile_all
compile_all([Job(0, TARGETS["sm_90"], {{"do": {str(tmp_path)!r}}})], command={command!r})
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[4])
    file = tmp_path / "pids"
    assert eventually(lambda: file.exists() and file.read_text().endswith(" "))
    process.kill()
    process.wait()

    assert eventually(lambda: not any(alive(int(pid)) for pid in file.read_text().split()))
