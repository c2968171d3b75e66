"""Canaries of two kernels, and a judge that only listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pytest_fusion import canary
from pytest_fusion.canary import Canary, Policy
from pytest_fusion.canary.evidence.observation import Decision, Observation

Kernel = Callable[..., Any]


def made(incumbent: Kernel, candidate: Kernel, judge: Any = None, **policy: Any) -> Canary:
    return canary(
        "k",
        incumbent=incumbent,
        candidate=candidate,
        judge=judge,
        policy=Policy(**{"interval_s": 3600.0, "timed": 0.0, **policy}),
    )


def double(x: Tensor) -> Tensor:
    return x * 2


def added(x: Tensor) -> Tensor:
    return x + x


class Patient:
    """A judge that is told all and does nothing, so that a test sees more than the first failure."""

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def update(self, observation: Observation) -> Decision:
        self.seen.append(observation)
        return Decision("hold")


def observed(judge: Patient) -> list[str]:
    return [observation.result for observation in judge.seen]
