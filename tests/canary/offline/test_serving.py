"""What the incumbent's process answers, asked over its pipes from another thread."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pytest_fusion.canary.offline import paired_latency
from pytest_fusion.canary.offline.incumbent import serving
from pytest_fusion.canary.offline.incumbent.incumbent_process import Process, Remote
from pytest_fusion.canary.offline.kernel import Kernel, contract
from pytest_fusion.case.case_model import Case
from pytest_fusion.errors import CanaryError
from pytest_fusion.run.process.worker import Messages, Worker, WorkerLost
from tests.canary.offline import kernels
from tests.canary.offline.test_latency import device, entries

__all__ = ["device"]
SPEC = kernels.SPEC.with_(bench=[{"rows": 8, "hidden": 8}])


class _Thread(Worker):
    """The other end of a thread's pipes."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    def stop(self) -> int:
        self._messages.close()
        return 0


class _Here(Process):
    """A process that is a thread of this one."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self.messages = Messages(ours_in, ours_out)
        self._worker = _Thread(self.messages)
        opened = {"contract": contract(SPEC), "programs": 100, "deep": False}
        self.link = serving._Link({"top": os.fspath(folder)}, theirs_in, theirs_out)
        self.link.opened = opened
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(WorkerLost):
            serving._answer_all(self.link, SPEC, "cpu", {})


@pytest.fixture
def remote(tmp_path: Any) -> Iterator[Remote]:
    process = _Here(tmp_path)
    assert not {"error", "missing"} & set(process.messages.receive(60.0))
    context = kernels_bench()
    yield Remote(process, context.device, 60.0)
    process.stop()
    process.thread.join()
    process.end()


def kernels_bench() -> Any:
    import torch

    from pytest_fusion.checks.context import Context

    return Context(SPEC, torch.device("cpu"))


def _case() -> Case:
    return entries(SPEC)[0].case


def test_an_error_of_ours_is_no_crash_of_the_kernel(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong while a kernel is asked is told as such, and the process answers the next question."""

    def broken(self: Kernel, case: Case) -> Any:
        raise RuntimeError("no bytes")

    assert remote.judge(_case(), again=False).verdict == "pass"
    with monkeypatch.context() as patched:
        patched.setattr(Kernel, "measure", broken)
        with pytest.raises(CanaryError, match="measure: RuntimeError: no bytes"):
            remote.measure(_case())
    assert remote.measure(_case()).outputs


def test_the_process_works_before_its_result_is_wanted(remote: Remote) -> None:
    """The results of two requests, the second without that of the first."""
    judging = remote.judging(_case(), again=False)
    assert judging().verdict == "pass"
    remote.judging(_case(), again=True)
    assert remote.measuring(_case())().outputs


@pytest.mark.slow
def test_costs_are_answered_as_data(remote: Remote) -> None:
    """A kernel of plain torch compiles nothing and spills nothing, and both are said in JSON."""
    remote.measure(_case())

    assert remote.compiled([_case().key()]).kernels == 0
    assert (remote.spills([("small", _case())]).bytes, remote.spills([]).bytes) == ({"small": 0}, {})


def test_what_cannot_be_timed_says_why(remote: Remote) -> None:
    """A call on a machine without a GPU has no device seconds, and a question after it none either."""
    with pytest.raises(CanaryError, match="called there to be timed, it raised"):
        remote.timer(_case(), "fused")
    with pytest.raises(CanaryError, match="called there to be timed, it raised"):
        remote._request("sample")


def test_samples_are_those_of_the_batch_that_was_asked_for(
    remote: Remote, device: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question for a sample runs the batch once, there; a batch that was freed answers no more."""
    seconds = iter((1e-6, 2e-6))

    class Batch:
        def seconds(self) -> float:
            return next(seconds)

    device.clear()
    monkeypatch.setattr(paired_latency, "timer", lambda *_: Batch())
    monkeypatch.setattr("pytest_fusion.bench.on_device.opened", paired_latency.opened)
    timer = remote.timer(_case(), "reference")

    assert timer.source == paired_latency.latency.digest(SPEC.reference)
    assert [timer.seconds(), timer.seconds()] == [1e-6, 2e-6]
    remote.untime()
    with pytest.raises(CanaryError):
        timer.seconds()
