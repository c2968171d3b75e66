"""Logs of many processes put together: nothing is counted twice, nothing is missed in silence."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion.canary import Canary
from pytest_fusion.canary.evidence.events import read
from pytest_fusion.canary.evidence.evidence_counts import Evidence
from pytest_fusion.canary.evidence.fleet import Chain, bounded, gather, select, verdict
from pytest_fusion.canary.evidence.ledger import BLOCKS_PER_TOTAL
from pytest_fusion.canary.evidence.promotion_rules import RULES, without
from pytest_fusion.errors import CanaryError
from pytest_fusion.plugin.cli import main
from tests.canary.kernels import Kernel, Patient, added, double, made

UNASKED = ["error_ratio", "latency_ratio"]


def _ran(folder: Path, calls: int, candidate: Kernel = added, **policy: Any) -> Canary:
    kernel = made(double, candidate, Patient(), shadow=1.0, directory=folder, **policy)
    for number in range(calls):
        kernel(torch.ones(1 + number % 2, 4))
        kernel.refresh()
    return kernel


def _log(kernel: Canary) -> Path:
    return Path(kernel.status()["log"])


def test_evidence_of_all_processes_adds_up(tmp_path: Path) -> None:
    """Logs in folders of their own, as machines write them, make the sum of what each process saw."""
    kernels = [_ran(tmp_path / f"replica-{number}", 3 + number) for number in range(3)]
    (rollout,), left = gather(tmp_path)

    assert rollout.evidence == reduce(Evidence.__add__, [kernel.evidence() for kernel in kernels])
    assert rollout.counts == {"compared: ok": 12}
    assert rollout.served == {("shadow", "incumbent"): 12}
    assert [process.state for process in rollout.processes.values()] == ["shadow"] * 3
    assert (rollout.gaps, rollout.trips, left) == ((), (), [])


def test_a_log_that_was_copied_counts_once(tmp_path: Path) -> None:
    """The same process in two files, as backups leave them, is one process."""
    kernel = _ran(tmp_path, 5)
    shutil.copy(_log(kernel), tmp_path / "copy of a log.jsonl")
    (rollout,), _ = gather(tmp_path)

    assert rollout.evidence == kernel.evidence()
    assert rollout.counts == {"compared: ok": 5}


def test_lines_that_were_lost_are_missed(tmp_path: Path) -> None:
    """A block that is not there makes the verdict an error that says which; it is no comparison without violation."""
    kernel = _ran(tmp_path, 6)
    path = _log(kernel)
    lines = path.read_text().splitlines(keepends=True)
    lost = next(number for number, line in enumerate(lines) if '"block":3' in line)
    path.write_text("".join(lines[:lost] + lines[lost + 1 :]))
    (rollout,), _ = gather(tmp_path)

    assert rollout.evidence != kernel.evidence()
    assert rollout.evidence + Evidence.from_json(json.loads(lines[lost])["evidence"]) == kernel.evidence()
    found = verdict(rollout, without(RULES, UNASKED))
    assert found.decision == "error"
    assert "blocks 3 to 3 were lost" in found.reasons[0]


def test_a_total_makes_up_for_lost_lines(tmp_path: Path) -> None:
    """After a total, what a full disk or the rotation of the log took before it is there again."""
    kernel = _ran(tmp_path, BLOCKS_PER_TOTAL + 3)
    path = _log(kernel)
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if '"block":7,' not in line))
    (rollout,), _ = gather(tmp_path)

    assert rollout.gaps == ()
    assert rollout.evidence == kernel.evidence()


@pytest.mark.slow
def test_a_rotated_log_is_whole(tmp_path: Path) -> None:
    """However often the log is rotated, the evidence in what is left of it is all evidence."""
    kernel = _ran(tmp_path, 5 * BLOCKS_PER_TOTAL, log_mib=0.15)
    (rollout,), _ = gather(tmp_path)

    assert len(list(tmp_path.glob("*.jsonl"))) == 2
    assert sum(event["event"] == "block" for path in tmp_path.glob("*.jsonl") for event in read(path)) < 300
    assert rollout.gaps == ()
    assert rollout.evidence == kernel.evidence()


def test_a_full_disk_is_an_error_until_a_total_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that found no space are missed, and back with the next total, for the process had not forgotten them."""
    kernel, write = _ran(tmp_path, 4), os.write

    def full(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for _ in range(3):
        kernel(torch.ones(4))
        kernel.refresh()
    monkeypatch.setattr(os, "write", write)
    kernel(torch.ones(4))
    kernel.refresh()
    (rollout,), _ = gather(tmp_path)
    assert verdict(rollout, without(RULES, UNASKED)).decision == "error"
    assert "were lost to a full disk" in rollout.gaps[0]

    for _ in range(BLOCKS_PER_TOTAL):
        kernel(torch.ones(4))
        kernel.refresh()
    (rollout,), _ = gather(tmp_path)
    assert rollout.gaps == ()
    assert rollout.evidence == kernel.evidence()


def test_pieces_come_in_any_order() -> None:
    """Blocks and totals, shuffled and repeated, with any of them missing: no observation counts twice."""
    generator = random.Random(1)
    for _ in range(200):
        blocks = [
            {"since": n, "block": n, "part": 1, "parts": 1, "evidence": Evidence("r", {"b": 2**n}).as_json()}
            for n in range(1, 9)
        ]
        whole = Evidence("r", {"b": 2**5 - 2}).as_json()
        pieces = [*blocks, {"since": 1, "block": 4, "part": 1, "parts": 1, "evidence": whole}]
        left = generator.sample(pieces, generator.randrange(1, 10))
        chain = Chain("r")
        for piece in left + generator.sample(left, len(left) // 2):
            chain.add(piece)
        evidence, missing = chain.evidence()

        total = evidence.calls.get("b", 0)
        there = [n for n in range(1, 9) if total & 2**n]
        lost = [n for first, last in missing for n in range(first, last + 1)]
        assert total < 2**9
        assert sorted(there + lost) == list(range(1, max(piece["block"] for piece in left) + 1))


@pytest.mark.parametrize(
    "damage", [{"evidence": {"schema": 9}}, {"evidence": None}, {"parts": 2}, {"since": "x"}, {"since": 0}]
)
def test_a_piece_that_cannot_be_read_is_missing(damage: dict[str, Any]) -> None:
    """Of another version, incomplete or damaged: it is not counted, and known not to be."""
    chain = Chain("r")
    piece = {"since": 1, "block": 1, "part": 1, "parts": 1, "evidence": Evidence("r", {"b": 1}).as_json()}
    chain.add({**piece, **damage})

    assert chain.evidence() == (Evidence("r"), [(1, 1)])


_KILLED = """
import sys, torch
from pytest_fusion import canary
from pytest_fusion.canary import Policy

policy = Policy(shadow=1.0, directory=sys.argv[1], interval_s=0.001, timed=0.0)
kernel = canary("k", incumbent=lambda x: x * 2, candidate=lambda x: x + x, policy=policy)
for _ in range(20):
    kernel(torch.ones(2))
kernel.refresh()
print("ready", flush=True)
while True:
    kernel(torch.ones(2))
"""


@pytest.mark.slow
def test_what_a_killed_process_wrote_counts(tmp_path: Path) -> None:
    """SIGKILL while blocks are written: what was written is evidence, and nothing is missing in between."""
    with subprocess.Popen([sys.executable, "-c", _KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
    (rollout,), _ = gather(tmp_path)

    assert rollout.gaps == ()
    assert rollout.evidence.pooled("violation").counts[0] >= 20
    assert rollout.evidence.calls["float32[2^1]"] >= rollout.evidence.pooled("violation").seen


def test_foreign_and_broken_files_are_named_and_left_out(tmp_path: Path) -> None:
    """Other JSON lines, other texts, half a line and bytes: none is evidence, and none stops the reader."""
    kernel = _ran(tmp_path, 4)
    _log(kernel).write_bytes(_log(kernel).read_bytes() + b'{"time":1,"n":9,"pid":1,"name":"k","event":"blo')
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n[1, 2]\n"text"\n')
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\x00\n\n")
    (tmp_path / "folder.jsonl").mkdir()
    odd = {"time": 1.0, "pid": 1, "name": "k", "event": "block", "rollout": "1", "process": "p", "block": "x"}
    (tmp_path / "odd.jsonl").write_text(json.dumps(odd) + "\n" + json.dumps({**odd, "time": "soon"}) + "\n")
    (rollout,), left = gather(tmp_path)

    assert rollout.evidence == kernel.evidence()
    assert [Path(text.partition(": ")[0]).name for text in left] == ["bytes.jsonl", "folder.jsonl", "other.jsonl"]


def test_rollouts_and_canaries_do_not_mix(tmp_path: Path) -> None:
    """Evidence belongs to the rollout in which it was seen; the one that was heard of last is the current one."""
    kernel = _ran(tmp_path, 3)
    kernel.rearm("2")
    kernel(torch.ones(1))
    kernel.refresh()
    rollouts, _ = gather(tmp_path)

    assert [(one.rollout, one.current, one.evidence.pooled("fault").seen) for one in rollouts] == [
        ("1", False, 3),
        ("2", True, 1),
    ]
    assert [one.rollout for one in select(rollouts, None, None)] == ["2"]
    assert [one.rollout for one in select(rollouts, "k", "1")] == ["1"]
    for name, rollout, message in (("l", None, "known: k"), ("k", "3", "known: 1, 2")):
        with pytest.raises(CanaryError, match=message):
            select(rollouts, name, rollout)


def test_a_trip_anywhere_sends_the_rollout_back(tmp_path: Path) -> None:
    """One process that tripped is enough, though the others saw nothing; its mark says so when its log is gone."""
    _ran(tmp_path, 30)
    bad = made(double, lambda x: x * 3, shadow=1.0, directory=tmp_path, trip_after=1)
    bad(torch.ones(4))
    bad.refresh()
    (rollout,), _ = gather(tmp_path)
    assert verdict(rollout).decision == "rollback"
    assert "1 failures in the last 1 runs" in verdict(rollout).reasons[0]
    assert "violation in float32" in rollout.failures[0]

    _log(bad).unlink()
    (rollout,), _ = gather(tmp_path)
    assert verdict(rollout).decision == "rollback"
    assert "by its mark" in verdict(rollout).reasons[0]


def test_buckets_of_a_fleet_are_bounded() -> None:
    """Processes that saw other shapes have more buckets together than any alone: the rarest are judged as one."""
    evidence = Evidence("r", {f"b{number:03}": 1000 - number for number in range(100)})
    found = bounded(evidence, 64)

    assert len(found.buckets()) == 64
    assert sum(found.calls.values()) == sum(evidence.calls.values())
    assert found.calls["b000"] == 1000
    assert "b099" not in found.calls


def _status(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["canary", "status", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def _written(folder: Path, comparisons: int, result: str = "ok", many: int = 0) -> None:
    """The log of a process that saw so many comparisons, ``many`` of them with another result."""
    from pytest_fusion.canary.evidence.events import Log
    from pytest_fusion.canary.evidence.ledger import Ledger
    from pytest_fusion.canary.evidence.observation import Observation

    log = Log("k", folder, 1 << 24)
    ledger = Ledger(log, "7", RULES)
    log.add("start", rollout="7", state="shadow", tripped=None, incumbent="a:f", candidate="b:g")
    for number in range(comparisons):
        ledger.traffic.slot("shadow", (torch.empty(4),), {})
        ledger.observe(Observation(result if number < many else "ok", "float32[2^2]"))
    ledger.write()
    log.flush()


@pytest.mark.parametrize(
    ("comparisons", "result", "many", "code", "decision"),
    [
        (60_000, "ok", 0, 0, "promote"),
        (2_000, "violation", 20, 1, "rollback"),
        (2_000, "ok", 0, 3, "hold"),
        (10, "ok", 0, 5, "nodata"),
    ],
)
def test_the_exit_status_is_the_verdict(
    comparisons: int,
    result: str,
    many: int,
    code: int,
    decision: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each verdict has a status of its own; without ``--judge`` there is no verdict, and 0."""
    _written(tmp_path, comparisons, result, many)
    found, text = _status(capsys, tmp_path, "--judge", "--without", ",".join(UNASKED))

    assert (found, f"verdict: {decision}" in text) == (code, True), text
    assert _status(capsys, tmp_path)[0] == 0


@pytest.mark.slow
def test_missing_ratios_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Clean comparisons alone promote nobody while latency and errors are asked about."""
    _written(tmp_path, 60_000)
    code, text = _status(capsys, tmp_path, "--judge")

    assert code == 3
    assert "latency_ratio: 0 observations, and 50 are needed" in text
    assert "error_ratio: 0 observations, and 50 are needed" in text


def test_status_is_read_by_people_and_by_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text has kernels, states, a row for each bucket and what was left out; the JSON has the evidence itself."""
    kernel = _ran(tmp_path, 8)
    (tmp_path / "other.jsonl").write_text("{}\n")
    _, text = _status(capsys, tmp_path)
    code, data = _status(capsys, tmp_path, "--json", "--judge")

    assert "k, rollout 1: tests.canary.kernels:double -> tests.canary.kernels:added" in text
    assert "processes: shadow in 1" in text
    assert "calls: incumbent 8 in shadow" in text
    assert "float32[2^1,2^2]      4  50.0 %" in text
    assert "other.jsonl: no event of a canary is in it" in text
    (found,) = json.loads(data)["canaries"]
    assert Evidence.from_json(found["evidence"]) == kernel.evidence()
    assert (found["judgement"]["decision"], code) == ("nodata", 5)


def test_an_empty_folder_is_no_data_and_a_missing_one_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody has written yet: nothing to judge. No folder, no such metric: wrong use."""
    assert _status(capsys, tmp_path, "--judge")[0] == 5
    code, text = _status(capsys, tmp_path / "nowhere")
    assert (code, "is not a folder" in text) == (4, True)
    code, text = _status(capsys, tmp_path, "--without", "latency")
    assert (code, "did you mean 'latency_ratio'" in text) == (4, True)
    code, text = _status(capsys, tmp_path, "--without", ",".join(metric.name for metric in RULES.metrics))
    assert (code, "nothing to judge by" in text) == (4, True)
