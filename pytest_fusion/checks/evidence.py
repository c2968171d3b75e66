"""Evidence of verdicts: fields that the package reads, and `Facts` that only people read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pytest_fusion.interpreter.memory.memory_findings import Finding


@dataclass(frozen=True, slots=True)
class Evidence:
    """JSON types only, so that a verdict survives xdist and a forked child."""

    def as_json(self) -> dict[str, Any]:
        """The facts for a report, without optional ones that are ``None``."""
        optional = {each.name for each in fields(self) if each.default is None}
        return {name: value for name, value in asdict(self).items() if value is not None or name not in optional}


@dataclass(frozen=True, slots=True)
class Facts(Evidence):
    """Facts for the report."""

    named: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The facts as they were named."""
        return dict(self.named)


@dataclass(frozen=True, slots=True)
class Deviation(Evidence):
    """How far an output's worst element, or a statistic, is off; ``ratio`` is the error over the allowed one."""

    statistic: str
    ratio: float
    index: list[int] | None
    got: Any
    expected: Any
    allowed: Any
    mismatched: int
    total: int
    grade: str | None


@dataclass(frozen=True, slots=True)
class WrongGradient(Evidence):
    """How far a gradient is off, for which upstream gradients, and the constant factor if there is one."""

    deviation: Deviation
    upstream: str
    layouts: Mapping[str, str]
    upstream_strides: Mapping[str, Any]
    wanted: list[str]
    ratio_to_right: float | None = None

    def as_json(self) -> dict[str, Any]:
        """All in one mapping."""
        found = Evidence.as_json(self)
        return {**found.pop("deviation"), **found}


@dataclass(frozen=True, slots=True)
class WrongAccess(Evidence):
    """A wrong access that the interpreter saw."""

    seen: Finding

    def as_json(self) -> dict[str, Any]:
        """Its fields except empty ones."""
        found = {key: value for key, value in asdict(self.seen).items() if value not in (None, "")}
        return {"access": found.pop("kind"), **found}


@dataclass(frozen=True, slots=True)
class DamagedMemory(Evidence):
    """Bytes that changed in the ``zone`` before, after or between a tensor's elements, ``elements`` away."""

    tensor: str
    zone: str
    elements: int
    farthest: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ChangedInput(Evidence):
    """Elements of an input that a call changed; ``by`` is the call, unless the case's own."""

    input: str
    count: int
    first: list[int]
    by: str | None = None


@dataclass(frozen=True, slots=True)
class SliceDifference(Evidence):
    """A slice whose bits differ, and what they depend on: size, position or neighbours."""

    dim: str
    depends_on: str
    sizes: list[int]
    slice: int
    first: list[int]
    count: int
    ulp: int | None


@dataclass(frozen=True, slots=True)
class WrongConfig(Evidence):
    """The wrong config of an autotuned kernel; none if the call that tunes it is wrong."""

    kernel: str
    found: Mapping[str, Any]
    index: int | None = None
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Rejections(Evidence):
    """Why no case could be judged: counts by kind, and in words."""

    rejected: Mapping[str, int]
    kinds: str


@dataclass(frozen=True, slots=True)
class ProcessEnd(Evidence):
    """How the process of a case ended: by a ``"signal"``, a ``"timeout"`` or an ``"exit"``."""

    kind: str
    detail: str
