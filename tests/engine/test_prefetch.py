"""Compiling ahead: forked workers that wait for the first miss, share the work, and end with the test."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_fusion.run.process import compile_ahead, shared_cases


def _files(folder: Path, count: int) -> list[str]:
    """Their names, once there are so many; within ten seconds."""
    for _ in range(200):
        if len(found := sorted(path.name for path in folder.iterdir())) >= count:
            return found
        time.sleep(0.05)
    return found


def test_workers_share_the_work_once_they_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn is one worker's, and all give way; before the start none does anything."""
    monkeypatch.setattr(compile_ahead, "workers", lambda: 3)

    mine = os.getpriority(os.PRIO_PROCESS, 0)

    def work(turns: Iterator[int]) -> None:
        for turn in itertools.takewhile(lambda turn: turn < 12, turns):
            later = os.getpriority(os.PRIO_PROCESS, 0) > mine or mine == 19
            (tmp_path / f"{turn:02}{', gives way' if later else ''}").touch(exist_ok=False)

    shared = shared_cases.Shared()
    with compile_ahead.compiling_ahead(work, shared):
        assert not list(tmp_path.iterdir())
        shared.begin()
        shared.begin()
        assert _files(tmp_path, 12) == [f"{turn:02}, gives way" for turn in range(12)]


def test_workers_of_all_tests_have_the_cores_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one core the worker of a second test waits for as long as that of the first works."""
    monkeypatch.setattr(compile_ahead, "workers", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    began = tmp_path / "began"
    began.mkdir()

    def work(turns: Iterator[int]) -> None:
        next(turns)
        (began / str(os.getpid())).touch()
        time.sleep(600)

    first, second = shared_cases.Shared(), shared_cases.Shared()
    with compile_ahead.compiling_ahead(work, second):
        with compile_ahead.compiling_ahead(work, first):
            first.begin()
            assert len(_files(began, 1)) == 1
            second.begin()
            time.sleep(0.2)
            assert len(_files(began, 1)) == 1
        assert len(_files(began, 2)) == 2


def test_what_a_worker_raises_or_still_does_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One raises, one would go on for ever: the test sees neither, and no process is left."""
    monkeypatch.setattr(compile_ahead, "workers", lambda: 2)

    def work(turns: Iterator[int]) -> None:
        turn = next(turns)
        (tmp_path / str(os.getpid())).touch()
        if turn:
            raise RuntimeError("dropped")
        time.sleep(600)

    shared = shared_cases.Shared()
    with compile_ahead.compiling_ahead(work, shared):
        shared.begin()
        pids = _files(tmp_path, 2)
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_with_a_warm_cache_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a call of start the workers end without having worked."""
    monkeypatch.setattr(compile_ahead, "workers", lambda: 1)

    def work(turns: Iterator[int]) -> None:
        next(turns)
        (tmp_path / "worked").touch()

    with compile_ahead.compiling_ahead(work, shared_cases.Shared()):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("processes", "cores", "expected"), [(1, 16, 12), (4, 16, 6), (8, 16, 2), (16, 16, 0)])
def test_cores_are_left_for_the_tests(
    processes: int, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve at most, and none where each worker of pytest-xdist has one core."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(processes))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert compile_ahead.workers() == expected


def test_cases_that_a_worker_compiles_wait_until_it_has() -> None:
    """The test goes on with others, and then takes those that are finished in their order."""
    shared = shared_cases.Shared()
    for number in (0, 1, 3):
        assert shared.take(number)
    cases = shared.finished_first("abcdef", None)
    assert [next(cases), next(cases)] == ["c", "e"]
    shared.finish(3)
    assert next(cases) == "d"
    shared.finish(0)
    assert list(cases) == ["f", "a", "b"]


def test_a_test_with_a_budget_leaves_out_what_is_not_compiled_in_time() -> None:
    """Its seconds pass at the end, while it waits; what is finished until then still comes."""
    shared = shared_cases.Shared()
    shared.join([os.getpid()], lambda: None)
    assert shared.take(0)
    assert shared.take(2)
    left = iter([True, True, False])
    cases = shared.finished_first("abc", lambda seconds: seconds > 0 and next(left))
    assert next(cases) == "b"
    shared.finish(2)
    assert list(cases) == ["c"]
    assert not list(left)


def _compiles(*cached: int) -> Callable[[shared_cases.Shared, int], None]:
    """What a case of this number does: its kernel is in the cache, or it is Triton's to compile."""
    from triton.compiler.compiler import ASTSource

    def case(shared: shared_cases.Shared, number: int) -> None:
        with contextlib.suppress(shared_cases.Uncompiled), shared.leaving():
            if number not in cached:
                ASTSource.make_ir(*[cast("Any", None)] * 6)

    return case


def test_a_case_that_is_not_compiled_is_put_off() -> None:
    """The first miss lets the workers begin; after three in a row none is tried, and what they finish comes."""
    begun: list[str] = []
    shared, case = shared_cases.Shared(), _compiles(0, 2)
    shared.join([os.getpid()], lambda: begun.append("begun"))
    cases, tried = shared.finished_first(range(8), lambda _: True, puts_off=True), []
    for number in itertools.islice(cases, 6):
        tried.append(number)
        assert not begun or number > 1
        case(shared, number)
        assert shared.put_off == (number not in (0, 2))
    assert tried == [0, 1, 2, 3, 4, 5]
    assert begun == ["begun"]
    for number in (7, 4):
        assert shared.take(number)
        shared.finish(number)
    assert list(itertools.islice(cases, 2)) == [4, 7]


def test_only_the_run_of_a_case_is_put_off() -> None:
    """Shrinking and explaining what it found are not, nor anything after the test has left the cases."""
    shared = shared_cases.Shared()
    shared.join([os.getpid()], lambda: None)
    cases = shared.finished_first(range(3), lambda _: True, puts_off=True)
    assert next(cases) == 0
    with shared.leaving():
        assert shared.putting_off
    assert not shared.putting_off
    assert next(cases) == 1
    cases.close()
    with shared.leaving():
        assert not shared.putting_off


def test_a_case_that_another_process_compiles_for_is_put_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of its kernel is not waited for, as it is where no case can be put off."""
    from triton.runtime.jit import JITFunction

    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(JITFunction, "_do_compile", lambda _kernel, key: time.sleep(600) if key == "other" else None)
    kernel: Any = SimpleNamespace(fn=_files)
    child = os.fork()
    if not child:
        with compile_ahead.compiled_once():
            JITFunction._do_compile(kernel, "other")
    try:
        shared, put_off = shared_cases.Shared(), []
        shared.join([child], lambda: None)
        time.sleep(0.2)
        for key in itertools.islice(shared.finished_first(("own", "other"), lambda _: True, puts_off=True), 2):
            lock = compile_ahead.compiled_once(shared)
            with contextlib.suppress(shared_cases.Uncompiled), lock, shared.leaving():
                JITFunction._do_compile(kernel, key)
            put_off.append(shared.put_off)
        assert put_off == [False, True]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_kernel_that_takes_too_long_ends_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """ptxas has some seconds where the test's are limited and no worker compiles for the case; else it may take any."""
    from triton.backends.nvidia import compiler

    monkeypatch.setattr(shared_cases, "PATIENCE_S", 0.1)
    shared = shared_cases.Shared()
    shared.join([os.getpid()], lambda: None)
    list(shared.finished_first((), lambda _: True, puts_off=True))
    with shared.leaving(further=True):
        assert compiler.subprocess.run(["sleep", "0"], check=True).returncode == 0
    with pytest.raises(shared_cases.Uncompiled), shared.leaving(further=True):
        compiler.subprocess.run(["sleep", "600"], check=True)
    assert not shared.put_off
    with shared.leaving():
        assert compiler.subprocess.run(["sleep", "0.2"], check=True).returncode == 0
    list(shared.finished_first((), None))
    with shared.leaving(further=True):
        assert compiler.subprocess.run(["sleep", "0.2"], check=True).returncode == 0


@pytest.mark.parametrize("worker", ["none", "dead"])
def test_without_a_worker_the_test_compiles(worker: str) -> None:
    """No case is put off where no other process would compile its kernels."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    shared, case = shared_cases.Shared(), _compiles()
    shared.join([child] if worker == "dead" else [], lambda: None)
    for number in shared.finished_first(range(5), lambda _: True, puts_off=True):
        with pytest.raises(AttributeError):
            case(shared, number)
        assert not shared.put_off


def test_a_case_at_which_a_worker_dies_is_the_tests() -> None:
    """A crash of the compiler is found like any other."""
    shared = shared_cases.Shared()
    if (child := os.fork()) == 0:
        shared.take(1)
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    shared.join([child, os.getpid()], lambda: None)
    assert not shared.take(1)
    assert list(shared.finished_first("abc", lambda _: True)) == ["a", "b", "c"]
    os.waitpid(child, 0)


def test_what_the_test_has_taken_no_worker_compiles() -> None:
    """And the other way round, also where both share the memory by a fork."""
    shared = shared_cases.Shared()
    if (child := os.fork()) == 0:
        os._exit(int(not shared.take(5)))
    assert os.waitpid(child, 0)[1] == 0
    assert not shared.take(5)
    assert shared.take(6)


def test_a_kernel_is_compiled_by_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another key is compiled meanwhile; the same key waits."""
    from triton.runtime.jit import JITFunction

    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    began = tmp_path / "began"
    began.mkdir()

    def compiles(_: Any, key: str) -> None:
        (began / f"{key} {os.getpid()}").touch()
        time.sleep(600)

    monkeypatch.setattr(JITFunction, "_do_compile", compiles)
    kernel: Any = SimpleNamespace(fn=_files)
    children = []
    try:
        for key in ("one", "one", "other"):
            if (child := os.fork()) == 0:
                with compile_ahead.compiled_once():
                    JITFunction._do_compile(kernel, key)
            children.append(child)
        time.sleep(0.2)
        assert [name.split()[0] for name in _files(began, 2)] == ["one", "other"]
        first = next(name.split()[1] for name in _files(began, 2))
        os.kill(int(first), signal.SIGKILL)
        assert [name.split()[0] for name in _files(began, 3)] == ["one", "one", "other"]
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
