"""Recording: what a serving process leaves of its calls, and what its callers never notice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_fusion import canary
from pytest_fusion.canary import Recorder
from pytest_fusion.canary.evidence import events
from pytest_fusion.canary.live import background
from pytest_fusion.canary.recording import recorded_file
from pytest_fusion.canary.recording.recorder import MOST_BUCKETS, OTHERS, PER_BUCKET, Bucket
from pytest_fusion.canary.recording.recordings import read
from pytest_fusion.errors import CanaryError

BIG = "float32[2^3,2^3]"


def kernel(x: Tensor, scale: float = 2.0, *, mode: str = "fast") -> Tensor:
    return x * scale


def made(folder: Path, function: Any = kernel, **options: Any) -> Recorder:
    return canary.record("k", function, folder, **{"interval_s": 3600.0, **options})


def lines(recorder: Recorder, kind: str) -> list[dict[str, Any]]:
    return [event for event in events.read(recorder.path) if event["event"] == kind]


def test_a_call_is_what_it_was(tmp_path: Path) -> None:
    """A recorded function returns what it returns, and the line says all of the call but the values."""
    recorder = made(tmp_path)
    base = torch.arange(48.0).reshape(6, 8)

    result = recorder(base[1:4, ::2], mode="slow")
    recorder.flush()

    assert torch.equal(result, base[1:4, ::2] * 2)
    assert recorder.__name__ == "kernel"
    (line,) = lines(recorder, "call")
    x = line["arguments"]["x"]
    assert (x["tensor"], x["strides"], x["offset"], x["dtype"]) == ([3, 4], [8, 2], 8, "float32")
    assert x["pointer"] == base[1:4, ::2].data_ptr() % 512
    assert (x["values"]["low"], x["values"]["high"], x["values"]["mean"]) == (8.0, 30.0, 19.0)
    assert line["arguments"]["scale"] == {"value": 2.0, "default": True}, "defaults are part of the call"
    assert line["arguments"]["mode"] == {"value": "slow"}
    assert lines(recorder, "calls")[-1]["calls"] == {"float32[2^2,2^2]": 1}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            torch.tensor([0.0, torch.nan, torch.inf, -3.0]),
            {"zeros": 0.25, "nan": 0.25, "inf": 0.25, "ninf": 0, "low": -3},
        ),
        (torch.tensor([torch.nan, -torch.inf]), {"nan": 0.5, "ninf": 0.5}),
        (torch.tensor([3, -7, 0, 0]), {"zeros": 0.5, "low": -7, "high": 3}),
        (torch.tensor([True, False, False, False]), {"mean": 0.25}),
        (torch.tensor([1 + 1j, 3 - 5j]), {"low": -5, "high": 3}),
        (torch.tensor([1.5, -448.0]).to(torch.float8_e4m3fn), {"low": -448.0, "high": 1.5}),
        (torch.arange(1 << 20, dtype=torch.int32).flip(0), {"low": 0, "high": (1 << 20) - 1}),
        (torch.tensor([2.5], dtype=torch.bfloat16).expand(4, 3), {"rms": 2.5, "absolute": 2.5}),
    ],
    ids=["float", "none finite", "int", "bool", "complex", "float8", "large int", "expanded"],
)
def test_the_summary_is_that_of_the_values(tmp_path: Path, values: Tensor, expected: dict[str, float]) -> None:
    """Shares of zeros, NaN and infinities, and the range, mean and scale of what is finite, in every dtype."""
    recorder = made(tmp_path, lambda x: x)
    recorder(values)
    recorder.flush()

    found = lines(recorder, "call")[0]["arguments"]["x"]["values"]

    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert ("low" in found) is (not {"nan", "ninf"} <= expected.keys() or "low" in expected)


def test_every_call_is_counted_and_few_are_kept(tmp_path: Path) -> None:
    """Counts are exact by class of shapes; of each class 64 calls are kept, the latest line of a place counts."""
    recorder = made(tmp_path)
    for i in range(700):
        recorder(torch.full((8, 8), float(i)))
        if i % 100 == 0:
            recorder(torch.ones(3))
            recorder.flush()
    recorder.close()

    calls = read(tmp_path)

    assert calls.total == 707
    weights: Counter[str] = Counter()
    for call in calls.sampled:
        weights[call.bucket] += call.weight  # type: ignore[assignment]
    assert weights == {BIG: pytest.approx(700), "float32[2^2]": pytest.approx(7)}
    kept = [call.event["arguments"]["x"]["values"]["mean"] for call in calls.sampled if call.bucket == BIG]
    assert len(kept) == len(set(kept)) == PER_BUCKET
    assert sum(value >= 350 for value in kept) in range(16, 49), "late calls have the chance that early ones have"


def test_each_call_has_the_same_chance() -> None:
    """Over many reservoirs the first, a middle and the last call are kept alike: 8 of 80 each time."""
    kept: Counter[int] = Counter()
    for seed in range(600):
        bucket, places = Bucket("b", seed, 8), dict[int, int]()
        for _ in range(80):
            number, place = bucket.admit()
            if place is not None:
                places[place] = number
        kept.update(places.values())

    assert sum(kept.values()) == 600 * 8
    # 60 expected of each call, standard deviation 7.3.
    assert all(25 < kept[number] < 100 for number in range(80))


def test_classes_beyond_the_limit_are_counted_together(tmp_path: Path) -> None:
    """No class is made for the 257th shape, and its calls are still counted."""
    recorder = made(tmp_path)
    for i in range(MOST_BUCKETS + 5):
        recorder(torch.empty(2 ** (i % 20), 2 ** (i // 20), device="meta"))

    calls = recorder.status()["calls"]
    assert calls[OTHERS] == 5
    assert len(calls) == MOST_BUCKETS + 1


def test_threads_lose_no_call(tmp_path: Path) -> None:
    """32 threads that call at once are all counted, each gets its own result, while another thread writes."""
    recorder = made(tmp_path)
    wrong: list[int] = []
    ready = threading.Barrier(33)

    def call(thread: int) -> None:
        ready.wait()
        for i in range(100):
            x = torch.full((8, 8) if i % 2 else (3,), float(thread))
            if not torch.equal(recorder(x), x * 2):
                wrong.append(thread)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    ready.wait()
    for _ in range(5):
        recorder.flush()
    for thread in threads:
        thread.join()
    recorder.close()

    assert wrong == []
    assert recorder.status()["calls"] == {BIG: 1600, "float32[2^2]": 1600}
    assert read(tmp_path).total == 3200


class _Odd:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("asked")


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        (_Odd(), {"other": "_Odd"}),
        ("a secret prompt " * 20, {"other": "str of 320"}),
        (list(range(1000)), {"other": "list of 1000"}),
        (float("nan"), {"value": {"float": "nan"}}),
        (torch.float16, {"value": {"dtype": "torch.float16"}}),
        ({"a": torch.ones(2)}, None),
        (torch.ones(2, device="meta"), None),
        (torch.ones(2, 2).to_sparse(), None),
        (torch.zeros(0, 5), None),
    ],
    ids=["object", "text", "list", "nan", "dtype", "dict", "meta", "sparse", "empty"],
)
def test_whatever_an_argument_is_the_call_goes_on(tmp_path: Path, argument: Any, shown: dict[str, Any] | None) -> None:
    """What no case could carry is named by its type, text and objects are not written down, and nothing is raised."""
    recorder = made(tmp_path, lambda x, y: y)

    assert recorder(torch.ones(2), argument) is argument
    recorder.flush()

    (line,) = lines(recorder, "call")
    assert shown is None or line["arguments"]["y"] == shown
    assert "secret" not in recorder.path.read_text()


class _Weight(torch.nn.Parameter):
    """As serving engines have them: a parameter with attributes, and functions of its own making."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class _Shard(Tensor):
    """As DTensor: what computes on it happens elsewhere."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was computed on a shard")


def test_weights_of_a_class_of_their_own_are_tensors_and_shards_are_not_touched(tmp_path: Path) -> None:
    """A subclass of Parameter is summarised; on one that dispatches elsewhere nothing is computed."""
    recorder = made(tmp_path, lambda x, y: 7)

    recorder(_Weight(torch.full((2, 2), 3.0)), _Shard(torch.ones(4)))
    recorder.flush()

    (line,) = lines(recorder, "call")
    assert line["arguments"]["x"]["values"]["mean"] == 3.0
    assert line["arguments"]["x"]["strides"] == [2, 1]
    assert line["arguments"]["y"] == {"tensor": [4], "dtype": "float32", "device": "cpu", "grad": False, "of": "_Shard"}
    assert recorder.status()["skipped"] == {}


def test_what_cannot_be_described_is_counted(tmp_path: Path) -> None:
    """A call of a hundred tensors, or nested without end, is served and counted, with the reason it was not kept."""
    recorder = made(tmp_path, lambda *x: 7)
    deep: list[Any] = []
    for _ in range(20):
        deep = [deep, torch.ones(1)]
    many = [[torch.ones(1)] * 60] * 2

    assert recorder(many) == recorder(deep) == 7
    skipped = recorder.status()["skipped"]
    assert [name for name in skipped if "more than 64 tensors" in name or "more than 6 deep" in name] == list(skipped)
    assert list(skipped.values()) == [1, 1]
    assert sum(recorder.status()["calls"].values()) == 2


def test_the_functions_own_errors_are_the_callers(tmp_path: Path) -> None:
    """A call that the function refuses raises what the function raises; that it was made is counted."""
    recorder = made(tmp_path, lambda x: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        recorder(torch.ones(2))
    with pytest.raises(TypeError, match="unexpected keyword"):
        recorder(torch.ones(2), nonsense=1)

    assert recorder.status()["calls"] == {"float32[2^1]": 2}
    assert sum(recorder.status()["skipped"].values()) == 1


def test_a_full_disk_costs_lines_and_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing can be written calls go on and are counted; what comes later makes the file whole again."""
    recorder = made(tmp_path)
    real = os.write

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(events.os, "write", full)
    for _ in range(3):
        recorder(torch.ones(8, 8))
    recorder.flush()
    assert recorder.status()["lost_lines"] > 0
    monkeypatch.setattr(events.os, "write", real)
    recorder(torch.ones(8, 8))
    recorder.close()

    assert read(tmp_path).total == 4


def test_a_publisher_that_raises_is_counted(tmp_path: Path) -> None:
    """Publishers are told each line; what they raise is nobody's trouble."""
    told: list[str] = []

    def publish(event: Any) -> None:
        told.append(event["event"])
        raise RuntimeError("down")

    recorder = made(tmp_path, publishers=[publish])
    recorder(torch.ones(8, 8))
    recorder.flush()

    assert told[0] == "recording"
    assert {"call", "calls"} <= set(told)
    assert recorder.status()["publish_errors"] == len(told)


def test_files_are_private(tmp_path: Path) -> None:
    """Neither the file nor what is made of it is readable for others, whatever the umask allows."""
    pytest.importorskip("safetensors")
    recorder = made(tmp_path, tensors=True)
    recorder(torch.ones(8, 8))
    recorder.flush()
    recorded_file.shorten(recorder.path, 0.0, 1e12)

    for path in (recorder.path, *recorded_file.tensors_of(recorder.path).iterdir()):
        assert path.stat().st_mode & 0o077 == 0
    assert recorded_file.tensors_of(recorder.path).stat().st_mode & 0o077 == 0


def test_tensors_are_kept_only_if_asked_for_and_in_bounds(tmp_path: Path) -> None:
    """Without ``tensors=True`` no value is written; with it calls that are too large, or too many, are summarised."""
    pytest.importorskip("safetensors")
    plain = made(tmp_path / "plain")
    plain(torch.full((8, 8), 1234.5678))
    plain.flush()
    assert not recorded_file.tensors_of(plain.path).exists()

    recorder = made(tmp_path / "kept", tensors=True, call_mib=300 / 2**20, tensors_mib=900 / 2**20)
    for i in range(6):
        recorder(torch.full((8, 8), float(i)))
        recorder.flush()
    recorder(torch.ones(16, 8))
    recorder.flush()

    files = list(recorded_file.tensors_of(recorder.path).iterdir())
    assert sum(path.stat().st_size for path in files) <= 900
    assert [("tensors" in line) for line in lines(recorder, "call")] == [True, True] + [False] * 5
    skipped = recorder.status()["skipped"]
    assert skipped["tensors not kept: more than tensors_mib"] == 4
    assert sum(skipped.values()) == 5


def test_tensors_of_calls_that_gave_way_are_deleted(tmp_path: Path) -> None:
    """The files are those of the calls that are kept, however many came by."""
    pytest.importorskip("safetensors")
    recorder = made(tmp_path, tensors=True)
    for i in range(400):
        recorder(torch.full((8, 8), float(i)))
        if i % 50 == 0:
            recorder.flush()
    recorder.close()

    named = {call.event["tensors"] for call in read(tmp_path).sampled}
    assert len(named) == PER_BUCKET
    assert {path.name for path in recorded_file.tensors_of(recorder.path).iterdir()} == named


def test_a_killed_process_leaves_a_file_that_is_read(tmp_path: Path) -> None:
    """Killed while it writes, a process loses what was not flushed and nothing else."""
    code = (
        "import sys, torch\nfrom pytest_fusion import canary\n"
        f"r = canary.record('k', lambda x: x, {str(tmp_path)!r}, interval_s=3600)\n"
        "while True:\n    r(torch.ones(8, 8)); r.flush(); print(1, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(100):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    (path,) = tmp_path.glob("*.recording.jsonl")
    with path.open("ab") as file:
        file.write(b'{"event":"calls","calls":{"float32[2^3,2^')

    assert read(tmp_path).total >= 100


def test_a_forked_process_writes_a_file_of_its_own(tmp_path: Path) -> None:
    """A child begins at zero; both files together count every call once."""
    recorder = made(tmp_path)
    recorder(torch.ones(8, 8))
    recorder.flush()
    child = os.fork()
    if child == 0:
        recorder(torch.ones(8, 8))
        recorder(torch.ones(8, 8))
        background._at_exit()
        os._exit(0)
    os.waitpid(child, 0)
    recorder(torch.ones(8, 8))
    recorder.flush()

    calls = read(tmp_path)
    assert (calls.files, calls.total, len(calls.sampled)) == (2, 4, 4)


def test_what_is_old_is_forgotten(tmp_path: Path) -> None:
    """Calls past their age are gone from reading and from the file, their counts stay; so are dead processes' files."""
    pytest.importorskip("safetensors")
    dead = tmp_path / "k.host.1.1.recording.jsonl"
    dead.write_text("{}\n")
    os.utime(dead, (1e9 - 3 * 86400, 1e9 - 3 * 86400))
    recorder = made(tmp_path, tensors=True, keep_days=2.0)
    now = [1e9]
    with recorder._tending:
        recorder._clock = recorder._log.clock = lambda: now[0]
        recorder._checked_age, recorder._oldest = 0.0, now[0]
    recorder(torch.ones(8, 8))
    recorder.flush()
    assert not dead.exists()
    now[0] += 3 * 86400
    assert read(tmp_path, now=now[0]).sampled == []
    recorder(torch.ones(8, 8))
    recorder.flush()

    calls = read(tmp_path, now=now[0])
    assert (calls.total, len(calls.sampled), calls.expired) == (2, 1, 0)
    assert len(lines(recorder, "call")) == 1
    assert len(list(recorded_file.tensors_of(recorder.path).iterdir())) == 1


def test_a_long_file_is_shortened_to_what_counts(tmp_path: Path) -> None:
    """A file that grows past its bound keeps the latest of each place and the counts."""
    recorder = made(tmp_path, file_mib=128 / 2**10)
    for i in range(3000):
        recorder(torch.ones(8, 8))
        if i % 3 == 0:
            recorder.flush()
    recorder.close()

    assert recorder.path.stat().st_size < 128 * 2**10
    calls = read(tmp_path)
    assert (calls.total, len(calls.sampled)) == (3000, PER_BUCKET)
    assert [json.loads(line)["event"] for line in recorder.path.read_text().splitlines()].count("recording") == 1


def test_a_file_that_cannot_be_shortened_stays_in_bounds(tmp_path: Path) -> None:
    """Where everything in it counts, further lines are lost and counted; the file does not grow."""
    log = events.Log("k", tmp_path, 4000, suffix=".x.jsonl", shorten=lambda path: None)
    for i in range(100):
        log.add("line", text="a" * 100, number=i)
        log.flush()

    assert log.path is not None
    kept = list(events.read(log.path))
    assert log.path.stat().st_size <= 4000
    assert [event["number"] for event in kept] == list(range(len(kept)))
    assert log.lost == 100 - len(kept) > 0


@pytest.mark.slow
def test_nothing_is_recorded_of_what_is_compiled(tmp_path: Path) -> None:
    """A traced call is the function alone: the graph is whole, and nothing of it is counted as a call."""
    recorder = made(tmp_path)
    compiled = torch.compile(lambda x: recorder(x) + 1, backend="eager", fullgraph=True)

    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))
    assert recorder.status()["calls"] == {}


def test_the_environment_switches_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``PYTEST_FUSION_RECORD=off`` leaves the function alone, and no file behind."""
    monkeypatch.setenv("PYTEST_FUSION_RECORD", "off")
    recorder = made(tmp_path / "folder")
    recorder(torch.ones(8, 8))
    recorder.close()

    assert recorder.status()["recording"] is False
    assert not (tmp_path / "folder").exists()


def test_draws_and_gradients_are_as_without(tmp_path: Path) -> None:
    """Random generators and autograd go on as if nobody had looked."""
    recorder = made(tmp_path, lambda x: torch.nn.functional.dropout(x, 0.5) * 2)
    x = torch.ones(64, requires_grad=True)
    torch.manual_seed(3)
    result = recorder(x)
    after = torch.rand(2)
    result.sum().backward()
    torch.manual_seed(3)

    assert torch.equal(result, torch.nn.functional.dropout(torch.ones(64), 0.5) * 2)
    assert torch.equal(after, torch.rand(2))
    assert x.grad is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "a:b"}, "without ':'"),
        ({"fn": 3}, "expected a function"),
        ({"keep_days": 0}, "keep_days=0"),
        ({"tensors_mib": float("nan")}, "tensors_mib=nan"),
        ({"path": __file__}, "is a file; give a folder"),
    ],
)
def test_misuse_is_told_at_once(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    """What cannot be meant is an error where it is written, not a recording without lines."""
    given = {"name": "k", "fn": kernel, "path": tmp_path, **options}
    with pytest.raises(CanaryError, match=said):
        canary.record(given.pop("name"), given.pop("fn"), given.pop("path"), **given)


def test_tensors_need_their_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without safetensors, asking for tensors is an error that says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CanaryError, match=r"pip install 'pytest-fusion\[record\]'"):
        made(tmp_path, tensors=True)
