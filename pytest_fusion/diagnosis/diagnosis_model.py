"""What a diagnosis says, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Found:
    """A cause that the experiments of one rule support, with what they showed, a sentence each."""

    cause: str
    evidence: list[str]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A slug of ``CAUSES``, what speaks for it, what was ruled out on the way, and how many runs that took."""

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
