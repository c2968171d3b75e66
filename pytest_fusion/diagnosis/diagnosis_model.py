"""A diagnosis as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A slug of ``CAUSES``, the evidence for it, what was ruled out, and the number of runs."""

    cause: str
    evidence: list[str] = field(default_factory=list)
    ruled_out: list[str] = field(default_factory=list)
    runs: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
