"""From calls in a serving process to the verdict on its log: what is equal is promoted, what is worse is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_fusion import FusionSpec, tensor
from pytest_fusion.canary import Policy, canary
from pytest_fusion.canary.evidence.fleet import gather, verdict
from pytest_fusion.canary.evidence.promotion_rules import METRICS, Rules
from pytest_fusion.canary.live.comparing import call_pairs
from tests.sweeps import sweep

# The judge's own rules with limits that a test of some seconds can show anything to be below.
_EVENTS = {"limit": 0.02, "bucket_limit": 0.1, "fewest": 50, "fewest_in_bucket": 50}
_RATIOS = {"fewest": 10, "fewest_in_bucket": 5}
RULES = Rules(
    metrics=tuple(
        replace(one, **(_EVENTS if one.is_rate else _RATIOS), fewest_itself=4 if one.fewest_itself else 0)
        for one in METRICS
    )
)
Kernel = Callable[[Tensor], Tensor]


class _Service:
    """Calls of two sizes, one in three of the larger; kernels move the clock on by what they are said to take."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.now = 0.0
        monkeypatch.setattr(call_pairs.time, "perf_counter", lambda: self.now)

    def kernel(self, seconds: Callable[[Tensor], float], call: Kernel) -> Kernel:
        def timed(x: Tensor) -> Tensor:
            self.now += seconds(x)
            return call(x)

        return timed

    def judged(self, candidate: Kernel, calls: int = 1500) -> tuple[str, str]:
        """The verdict on what the process wrote, and its reasons."""
        incumbent = self.kernel(lambda x: 1.0, _softmax)
        spec = FusionSpec(fused=incumbent, reference=_softmax, inputs={"x": tensor("rows n")})
        policy = Policy(shadow=1.0, timed=1.0, interval_s=3600, directory=self.folder, trip_after=1000)
        kernel = canary("k", incumbent=incumbent, candidate=candidate, policy=policy, spec=spec)
        assert kernel._measures._referee is not None
        kernel._measures._referee._clock = lambda: 0.0  # a judge that costs no time, and so waits for none
        generator = torch.Generator().manual_seed(0)
        for number in range(calls):
            kernel(torch.randn(16 if number % 3 else 64, 8, generator=generator))
            if number % 8 == 0:
                kernel.refresh()
        kernel.close()
        (rollout,), _ = gather(self.folder)
        assert rollout.gaps == ()
        found = verdict(rollout, RULES)
        return found.decision, "; ".join(found.reasons)


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Service:
    return _Service(tmp_path, monkeypatch)


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _other(x: Tensor) -> Tensor:
    power = torch.exp(x - x.amax(-1, keepdim=True))
    return power / power.sum(-1, keepdim=True)


def test_what_is_equal_is_promoted(serving: _Service) -> None:
    """Another kernel, as fast and as accurate, with evidence of every metric in both sizes."""
    decision, reasons = serving.judged(serving.kernel(lambda x: 1.0, _other))
    assert decision == "promote", reasons


def test_half_of_the_evidence_is_not_enough(serving: _Service) -> None:
    """The same kernel after a few calls: nothing bad was seen, and nothing is promoted."""
    decision, reasons = serving.judged(serving.kernel(lambda x: 1.0, _other), calls=120)
    assert decision in ("hold", "nodata"), reasons
    assert "are needed" in reasons


@sweep(
    ("calls", "seconds", "call", "decision", "reason"),
    [
        (1500, lambda x: 1.1, _other, "rollback", "latency_ratio: +10"),
        (400, lambda x: 1.0, lambda x: _other(x) * (1 + 3e-6), "hold", "error_ratio: at least +300"),
        (400, lambda x: 1.0, lambda x: _other(x) * (1.1 if len(x) == 64 else 1.0), "rollback", "violation in bucket"),
        (400, lambda x: 1.0, lambda x: _other(x).clone().fill_(float("nan")), "rollback", "nonfinite"),
    ],
    ids=["slower", "coarser", "wrong in one size", "not finite"],
    fast=("coarser", "wrong in one size", "not finite"),
)
def test_what_is_worse_is_not(
    calls: int, seconds: Callable[[Tensor], float], call: Kernel, decision: str, reason: str, serving: _Service
) -> None:
    """Slower or wrong, everywhere or in one size alone, goes back; less accurate within the tolerance is held."""
    found, reasons = serving.judged(serving.kernel(seconds, call), calls=calls)
    assert found == decision, reasons
    assert reason in reasons


@pytest.mark.slow
def test_what_is_slower_in_one_size_is_not_promoted(serving: _Service) -> None:
    """A quarter slower in a third of the calls: back, by the evidence of that bucket alone."""
    slower = serving.kernel(lambda x: 1.25 if len(x) == 64 else 1.0, _other)
    decision, reasons = serving.judged(slower, calls=2500)
    assert decision == "rollback", reasons
    assert "latency_ratio in bucket 'float32[2^6,2^3]'" in reasons


@pytest.mark.slow
def test_a_clock_that_favours_one_kernel_is_an_error(serving: _Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the incumbent beside itself is slower the second time it is run on copies, no latency counts."""
    runs: list[Any] = []
    around = call_pairs.Span.around

    def unfair(self: call_pairs.Span, call: Kernel) -> Kernel:
        def timed(x: Tensor) -> Tensor:
            serving.now += 0.2 * (id(self) == runs[-1])
            return call(x)

        return around(self, timed)

    made = call_pairs.Span.__init__

    def noted(self: call_pairs.Span, device: torch.device | None) -> None:
        made(self, device)
        runs.append(id(self))  # the span of the other kernel is made last

    monkeypatch.setattr(call_pairs.Span, "around", unfair)
    monkeypatch.setattr(call_pairs.Span, "__init__", noted)
    decision, reasons = serving.judged(serving.kernel(lambda x: 1.0, _other), calls=2500)
    assert decision == "error", reasons
    assert "the incumbent beside itself has" in reasons
