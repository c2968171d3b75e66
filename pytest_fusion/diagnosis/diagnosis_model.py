"""A diagnosis as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Found:
    """A cause that the experiments of one rule support, and its evidence, a sentence each."""

    cause: str
    evidence: list[str]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A slug of ``CAUSES``, the evidence for it, what was ruled out, and the number of runs."""

    cause: str
    evidence: list[str] = field(default_factory=list)
    ruled_out: list[str] = field(default_factory=list)
    runs: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "cause": self.cause,
            "evidence": list(self.evidence),
            "ruled_out": list(self.ruled_out),
            "runs": self.runs,
        }
