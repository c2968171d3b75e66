"""Counters of measured calls: a process of its own under ncu, and what is made of what that prints."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion.bench import bench_run, counters, profiled
from pytest_fusion.bench.bench_request import BenchRequest
from pytest_fusion.bench.counters import Counters, checked, counted, notes, split, under_ncu
from pytest_fusion.bench.measured import Figures, Found, Measured
from pytest_fusion.bench.profiled import BEGUN, DONE, RAISED
from pytest_fusion.run.measure.launches.launch_count import Counts, Uncounted
from pytest_fusion.run.measure.tools import ncu
from pytest_fusion.run.measure.tools.again import Again
from pytest_fusion.run.measure.tools.ncu import Profiled
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor

ROOT = Path(__file__).parents[2]
REAL = (ROOT / "tests" / "run" / "measure" / "ncu" / "softmax_h200.csv").read_text(encoding="utf-8")
ONE = Counts(1, 0, 0, (("k", 1),), "graph")
MARK = Profiled("spin_kernel(long)", 0, 0, 1e-6)
READS, WRITES = Profiled("reads(int *)", 100, 0, 2e-6), Profiled("void writes<4>(int *)", 0, 50, 3e-6)
GPU = {"lane": "cuda", "device": "cuda:0", "device_name": "made up", "capability": "9.0"}


def marked(*softmaxes: int) -> str:
    """What an H200 printed, with so many softmax kernels behind each mark, which stands where the input was drawn."""
    head, *lines = REAL.split('"0","1036"')
    first = [line.rstrip("\n") for line in lines[-1].splitlines()[1:] if line.startswith('"1",')]
    rows, number = [], 0
    for count in softmaxes:
        for kernel in ["spin_kernel(long)", *["softmax"] * count]:
            for line in first:
                cells = line.removeprefix('"1",')
                if kernel != "softmax":
                    process, name, host, _ = cells.split(",", 3)
                    rest = cells.partition('T5)",')[2]
                    cells = f'{process},{name},{host},"{kernel}",{rest}'
                rows.append(f'"{number}",{cells}')
            number += 1
    return "\n".join([head.rstrip("\n"), *rows])


def test_launches_belong_to_the_call_before_whose_mark_they_do_not_stand() -> None:
    """In the order of the calls, by readable names, without the marks."""
    steps = [(BEGUN, "b", ""), (DONE, "b", ""), (BEGUN, "a", ""), (DONE, "a", "")]
    a, b = split(["a", "b"], [MARK, READS, WRITES, MARK, WRITES], steps)
    assert [one.kernel for one in a.launches] == ["writes<4>"]
    assert [one.kernel for one in b.launches] == ["reads", "writes<4>"]
    assert (b.total("dram_read_bytes"), b.total("dram_written_bytes")) == (100, 50)


def test_a_lost_mark_makes_all_unknown() -> None:
    """Nobody can tell then which launches are whose."""
    steps = [(BEGUN, "a", ""), (DONE, "a", ""), (BEGUN, "b", ""), (DONE, "b", "")]
    for one in split(["a", "b"], [READS, MARK, WRITES], steps):
        assert one.reason == "ncu recorded 1 of 2 kernels that are known to have run"


def test_a_call_that_fails_under_ncu_leaves_the_others() -> None:
    """With its own words; without any where the process ended; and where it never came to it."""
    steps = [
        (BEGUN, "a", ""),
        (RAISED, "a", "the call raises OSError"),
        (BEGUN, "b", ""),
        (DONE, "b", ""),
        (BEGUN, "c", ""),
    ]
    a, b, c, d = split(["a", "b", "c", "d"], [MARK, MARK, READS, MARK, READS], steps)
    assert a.reason == "under ncu the call raises OSError"
    assert [one.kernel for one in b.launches] == ["reads"]
    assert c.reason == "under ncu the process ended within the call"
    assert split(["c"], [MARK], [(BEGUN, "c", "")], lost="ncu says: no driver")[0].reason == "ncu says: no driver"
    assert d.reason == "under ncu it was not called"


def test_fewer_kernels_than_are_launched_are_no_saved_traffic() -> None:
    """Unknown then, and where there is none at all; as many or more are what they are."""
    found = Counters("a", launches=(READS,))
    assert checked(found, ONE) == found
    assert checked(found, Uncounted("no reason")) == found
    assert checked(found, replace(ONE, kernels=2)).reason == "ncu profiled 1 kernel, and the call launches 2"
    assert checked(Counters("a"), Uncounted("no reason")).reason
    unknown = Counters("a", reason="r")
    assert checked(unknown, ONE) == unknown


def test_what_copy_engines_move_is_told() -> None:
    """ncu does not count it, so the sum is too small."""
    found = checked(Counters("a", launches=(READS,)), replace(ONE, memcpy=1, memset=1))
    assert found.unseen == 2
    assert notes([found]) == ["a: its counters leave out its copies and fills (2): ncu counts kernels alone"]


def test_json_has_totals_or_the_reason() -> None:
    """A total of which a part is missing is none."""
    found = Counters("a", launches=(READS, replace(WRITES, dram_read_bytes=None))).as_json()
    assert (found["status"], found["dram_read_bytes"], found["dram_written_bytes"]) == ("counted", None, 50)
    assert found["launches"][0]["kernel"] == "reads(int *)"
    unknown = Counters("a", reason="no ncu").as_json()
    assert unknown == {"case": "a", "role": "fused", "status": "unknown", "reason": "no ncu"}
    json.dumps([found, unknown], allow_nan=False)


def test_one_reason_is_told_once() -> None:
    """That ncu is missing is not said of each case."""
    same, other = Counters("a", reason="no ncu"), Counters("b", reason="no ncu")
    assert notes([same, other]) == ["no counters: no ncu"]
    assert notes([same, Counters("b", launches=(READS,))]) == ["a: no counters: no ncu"]
    assert notes([]) == []


FAKE = """#!{python}
# Stands for ncu: runs the program, and writes into its log what the test says.
import json, os, pathlib, subprocess, sys
here = pathlib.Path(__file__).parent
at = sys.argv.index("--metrics")
metrics, log = sys.argv[at + 1], sys.argv[sys.argv.index("--log-file") + 1]
with (here / "starts").open("a") as stream:
    print(metrics, file=stream)
code = subprocess.call(sys.argv[at + 2 :]) if (here / "runs").exists() else 0
said = (here / "said").read_text()
absent = here / "absent"
if absent.exists() and absent.read_text() in metrics:
    said = "==ERROR== Failed to find metric " + absent.read_text()
pathlib.Path(log).write_text(said)
sys.exit(code)
"""

TESTS = """
import torch
from pytest_fusion import fused_equivalent, tensor

def double(x):
    with open("calls.txt", "a") as stream:
        print(x.numel(), torch.is_grad_enabled(), file=stream)
    return x * 2

@fused_equivalent(
    lambda x: x + x, inputs={"x": tensor("n")}, bench=[{"n": 8, "dtype": torch.float32}, {"n": 16}, {"n": 32}]
)
def test_double(x):
    return double(x)
"""
CASES = ["n=8 float32", "n=16 bfloat16"]


class Tool:
    """A folder with an ncu that does what the test says."""

    def __init__(self, folder: Path, start: Path) -> None:
        self.folder, self.start = folder, start
        self.path = folder / "ncu"
        self.path.write_text(FAKE.format(python=sys.executable))
        self.path.chmod(0o755)
        self.says("")

    def says(self, text: str, *, runs: bool = False) -> None:
        (self.folder / "said").write_text(text)
        if runs:
            (self.folder / "runs").touch()

    def again(self) -> Again:
        return Again("test_it.py::test_double", self.start, "cpu")

    def under(self, cases: list[str]) -> list[Counters]:
        return under_ncu(str(self.path), self.again(), cases)

    @property
    def starts(self) -> list[str]:
        return (self.folder / "starts").read_text().splitlines()

    @property
    def calls(self) -> list[str]:
        return (self.start / "calls.txt").read_text().splitlines()


@pytest.fixture
def tool(pytester: pytest.Pytester, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Tool:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(counters, "_lacking", set())
    pytester.makepyfile(test_it=TESTS)
    return Tool(tmp_path_factory.mktemp("bin"), pytester.path)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "this user may not read the GPU's counters"),
        ("==ERROR== Failed to open lock file", "ncu says: Failed to open lock file"),
        (marked(1)[:-60], "ncu's output cannot be read: 13 of 15 columns"),
        (marked(1), "ncu recorded 1 of 0 kernels that are known to have run"),
        ("==ERROR== The application returned an error code (4).", "the test did not run under ncu (exit 0): no output"),
        ("==WARNING== No kernels were profiled.", "the test did not run under ncu (exit 0): no output"),
    ],
)
def test_whatever_ncu_says_instead_is_the_reason(tool: Tool, said: str, reason: str) -> None:
    """Of all cases, and nothing is raised."""
    tool.says(said)
    found = tool.under(CASES)
    assert [one.case for one in found] == CASES
    assert all(one.reason.startswith(reason) for one in found), found[0].reason


def test_nothing_profiled_is_unknown(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though every case was called."""
    monkeypatch.setattr(profiled, "steps", lambda _: [(BEGUN, CASES[0], ""), (DONE, CASES[0], "")])
    tool.says("==WARNING== No kernels were profiled.")
    assert tool.under(CASES[:1])[0].reason == "ncu profiled no kernel"


def test_a_metric_that_the_gpu_lacks_is_left_out(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    """ncu runs again without it, and no more with it; where it wants none of them, that is the reason."""
    steps = [(BEGUN, CASES[0], ""), (DONE, CASES[0], "")]
    monkeypatch.setattr(profiled, "steps", lambda _: steps)
    tool.says(marked(1))
    (tool.folder / "absent").write_text("sm__pipe_tensor_cycles_active")
    for _ in range(2):
        (found,) = tool.under(CASES[:1])
        assert found.launches[0].dram_read_bytes == 67_121_664
    named = ["sm__pipe_tensor_cycles_active" in line for line in tool.starts]
    assert named == [True, False, False]
    tool.says("==ERROR== no such metrics: " + " ".join(ncu.METRICS))
    assert tool.under(CASES[:1])[0].reason.startswith("ncu says: no such metrics")


def test_a_tool_that_does_not_end_or_start_is_the_reason(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench goes on."""
    tool.path.write_text("#!/bin/sh\nsleep 600\n")
    monkeypatch.setattr(counters, "_SECONDS", 0.5)
    assert tool.under(CASES)[1].reason == "ncu did not end within 0.5 s"
    tool.path.unlink()
    assert tool.under(CASES)[0].reason.startswith("ncu could not be started")


def test_one_process_at_a_time_is_under_ncu(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is second waits before it starts; a lock that cannot be had is the reason."""
    held: list[str] = []

    @contextlib.contextmanager
    def alone(name: str) -> Iterator[None]:
        held.append(name)
        yield
        held.append(f"{name}, started {len(tool.starts)} x")

    monkeypatch.setattr(counters, "alone", alone)
    tool.under(CASES)
    assert held == ["ncu", "ncu, started 1 x"]
    monkeypatch.setattr(counters, "alone", lambda _: tool.folder.read_text())
    assert tool.under(CASES)[0].reason.startswith("ncu could not be started: [Errno 21]")


def test_without_a_gpu_or_ncu_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started; and nothing is said without a request."""
    monkeypatch.setattr(ncu, "find", lambda: None)
    again = Again("t.py::test_f", Path(), "cuda:0")
    (here,) = counted(again, {"a": ONE}, on_gpu=True)
    assert "cuda-nsight-compute" in here.reason
    (there,) = counted(again, {"a": ONE}, on_gpu=False)
    assert there.reason == "ncu counts on a GPU; the interpreter has no counters"
    assert counted(None, {"a": ONE}, on_gpu=True) == []
    assert counted(again, {}, on_gpu=True) == []


@pytest.mark.slow
def test_a_bench_has_the_counters_of_its_entries(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an ncu on PATH, beside rows that do not change: of what was measured, and checked against its launches."""
    tool.says(marked(1, 1), runs=True)
    monkeypatch.setenv("PATH", f"{tool.folder}{os.pathsep}{os.environ['PATH']}")
    assert shutil.which("ncu") == str(tool.path)
    two = Counts(2, 0, 0, (("k", 2),), "graph")
    figures = [(case, Figures(counts, 64, counts, None)) for case, counts in zip(CASES, (ONE, two), strict=True)]
    found = Found({}, [*figures, ("n=32 bfloat16", "it raises")])
    monkeypatch.setattr(bench_run, "_session", lambda *_, **__: found)
    bench: list[Any] = [{"n": 8, "dtype": torch.float32}, {"n": 16}, {"n": 32}]
    spec = FusionSpec(name="f", fused=torch.relu, reference=torch.relu, inputs={"input": tensor("n")}, bench=bench)

    def measured(again: Again | None) -> Measured:
        request = BenchRequest(folder=tmp_path, counters=again)
        return bench_run.bench(spec, request, nodeid="t.py::test_f", environment=GPU, extra={})

    plain, more = measured(None), measured(tool.again())
    assert plain.counters == []
    assert [replace(row, made="") for row in more.rows] == [replace(row, made="") for row in plain.rows]
    assert [(one.case, one.total("dram_read_bytes")) for one in more.counters] == [
        (CASES[0], 67_121_664),
        (CASES[1], None),
    ]
    assert f"{CASES[1]}: no counters: ncu profiled 1 kernel, and the call launches 2" in more.notes
    assert [one["status"] for one in more.as_json()["counters"]] == ["counted", "unknown"]
    assert not more.failures
    assert tool.calls == ["8 False"] * 3 + ["16 False"] * 3
