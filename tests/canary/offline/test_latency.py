"""Latencies of two kernels in one process, with a GPU and its timers made up."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch

from pytest_fusion.bench.entries import entries
from pytest_fusion.canary.offline import paired_latency
from pytest_fusion.canary.offline.incumbent.incumbent_process import Remote
from pytest_fusion.canary.offline.kernel import Kernel
from pytest_fusion.canary.recording.recordings import Cases, RecordedCase
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.make import make_inputs
from pytest_fusion.checks.context import Context
from pytest_fusion.run.measure.timing.pairs import Blocks
from pytest_fusion.run.process.worker import WorkerLost
from tests.canary.offline import kernels

SPEC = kernels.SPEC.with_(bench=[{"rows": 8, "hidden": 8}, {"rows": 16, "hidden": 8}])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What the timer says of each kernel, by its name."""
    seconds: dict[str, float] = {}

    def timed(call: Any, *_: Any) -> tuple[float, bool]:
        return seconds[call.func.__name__], True

    def compared(candidate: float, control: float) -> Blocks:
        return Blocks(((candidate,) * 5,) * 10, ((control,) * 5,) * 10, True)

    monkeypatch.setattr(paired_latency, "opened", lambda device: SimpleNamespace(cache=1))
    monkeypatch.setattr(paired_latency, "alone", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(paired_latency, "count", lambda call, given, device: call())
    monkeypatch.setattr(
        paired_latency, "make_inputs", lambda spec, case, device: make_inputs(spec, case, torch.device("cpu"))
    )
    monkeypatch.setattr(paired_latency.latency, "timed", timed)
    monkeypatch.setattr(paired_latency.latency, "compared", compared)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return seconds


def timings(candidate: Any, incumbent: Any, spec: Any = SPEC) -> Any:
    ours, theirs = (Context(spec.with_(fused=fused), torch.device("cuda:0")) for fused in (candidate, incumbent))
    sized, lacking = paired_latency.sizes(spec, None)
    found = paired_latency.timings(ours, Kernel(theirs), sized)
    return found.timings, lacking or found.problem


def test_every_size_has_its_ratio(device: dict[str, float]) -> None:
    """The candidate's seconds over the incumbent's, as a logarithm, at each size of ``bench=``."""
    device.update(right=2e-6, another=1e-6)
    found, problem = timings(kernels.right, kernels.another)
    assert problem == ""
    assert [one.text for one in found] == ["rows=8 hidden=8 float32", "rows=16 hidden=8 float32"]
    assert [(one.ratio, one.candidate_s, one.incumbent_s) for one in found] == [
        (pytest.approx(0.6931, abs=1e-4), 2e-6, 1e-6)
    ] * 2


def test_a_size_that_one_cannot_bear_leaves_no_number(device: dict[str, float]) -> None:
    """A worst size among those that happened to work would be no worst size."""
    device.update(right=2e-6, refuses_long=1e-6)
    found, problem = timings(kernels.right, kernels.refuses_long)
    assert found == []
    assert problem.startswith("rows=16 hidden=8 float32: NotImplementedError")


def test_without_sizes_there_is_no_latency() -> None:
    """Fuzzed sizes are nobody's traffic, and that is said."""
    found, problem = timings(kernels.right, kernels.another, kernels.SPEC)
    assert (found, "no bench=" in problem) == ([], True)


def _recorded(*classes: tuple[str, float], total: int = 1000) -> Cases:
    plan = entries(SPEC)
    found = [RecordedCase(plan[0].case.with_(seed=seed), calls, name) for seed, (name, calls) in enumerate(classes)]
    return Cases("k", found, total, {}, {})


def test_recorded_classes_are_asked_about_by_their_heaviest_case() -> None:
    """Every class of a hundredth of the calls or more, with its share; they stand in place of ``bench=``."""
    traffic = _recorded(("a", 100), ("b", 300), ("a", 550), ("c", 45), ("d", 5))
    found, lacking = paired_latency.sizes(SPEC, traffic)
    assert lacking == ""
    assert [(one.text, one.case.seed, round(one.share, 3)) for one in found] == [
        ("a", 2, 0.65),
        ("b", 1, 0.3),
        ("c", 3, 0.045),
    ]


def test_a_small_part_of_the_traffic_is_no_traffic() -> None:
    """Where a tenth of the calls or more cannot be timed, their latency is not known, and that is said."""
    found, lacking = paired_latency.sizes(SPEC, _recorded(("a", 500), ("b", 390)))
    assert (len(found), "89.0% of the recorded calls, and 90% are needed" in lacking) == (2, True)


class _There(Remote):
    """Another process in which a call takes ``seconds`` and the reference ``reference``."""

    def __init__(self, seconds: float, reference: float, source: str = "") -> None:
        self.takes = {"fused": seconds, "reference": reference}
        self.source = source or paired_latency.latency.digest(SPEC.reference)
        self.freed = 0

    def timer(self, case: Case, what: Any) -> Any:  # noqa: ARG002 - every size takes as long
        # The made-up timers of this file are numbers.
        return _Number(self.takes[what], self.source)

    def untime(self) -> None:
        self.freed += 1


class _Number(float):
    source: str

    def __new__(cls, value: float, source: str) -> Self:
        made = super().__new__(cls, value)
        made.source = source
        return made


@pytest.mark.parametrize(
    ("reference", "source", "ratios", "words"),
    [
        (1e-6, "", [pytest.approx(0.6931, abs=1e-4)] * 2, ""),
        (1.2e-6, "", [], "the same reference takes 0.833 x as long here as in the incumbent's process"),
        (1.2e-6, "another", [pytest.approx(0.6931, abs=1e-4)] * 2, "reference is another one, so"),
    ],
)
def test_two_processes_are_compared_where_they_time_the_same_alike(
    device: dict[str, float], reference: float, source: str, ratios: list[Any], words: str
) -> None:
    """Each process is asked for its part of a pair, if one and the same reference takes as long in both."""
    device.update(right=2e-6, reference=1e-6)
    there = _There(1e-6, reference, source)
    sized, _ = paired_latency.sizes(SPEC, None)
    told: list[Case] = []
    ours = Context(SPEC.with_(fused=kernels.right), torch.device("cuda:0"))
    found = paired_latency.timings(ours, there, sized, told.append)

    assert [one.ratio for one in found.timings] == ratios
    assert words in "; ".join((found.problem, *found.notes))
    assert told[0] == sized[0].case
    assert there.freed == 1 + len(ratios)


def test_a_process_that_ends_leaves_no_number(device: dict[str, float]) -> None:
    """What it said before was of some of the sizes, and the reason is told."""
    device.update(right=2e-6, reference=1e-6)

    class Ended(_There):
        def timer(self, case: Case, what: Any) -> Any:
            if what == "fused":
                raise WorkerLost("its pipe is closed")
            return super().timer(case, what)

        def untime(self) -> None:
            raise WorkerLost("its pipe is closed")

    sized, _ = paired_latency.sizes(SPEC, None)
    ours = Context(SPEC.with_(fused=kernels.right), torch.device("cuda:0"))
    found = paired_latency.timings(ours, Ended(1e-6, 1e-6), sized)

    assert (found.timings, "its pipe is closed" in found.problem) == ([], True)
