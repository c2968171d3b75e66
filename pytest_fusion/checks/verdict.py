"""The conclusion of a check and what it saw, as plain data; the codes of hazards, and why a case was not judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Literal

from pytest_fusion.interpreter.memory.memory_findings import Finding

# Why a case was not judged, as names in records and counts. Sizes that allow no tensors:
IMPOSSIBLE: Final = "impossible"
# The kernel needs something that the CPU lane does not model.
NOT_MODELLED: Final = "not-modelled"
# More programs, or longer calls of kernel or reference, than a case may cost.
TOO_EXPENSIVE: Final = "too-expensive"
# In the kernel.
OUT_OF_MEMORY: Final = "out-of-memory"
# For the inputs, the reference, or its float64 lanes (two dozen after a suspected failure).
NO_ROOM_TO_JUDGE: Final = "no-room-to-judge"
# Kernels were compiled and not run.
DRY_RUN: Final = "dry run"

# The meaning of each code as a clause after "hazard:", those about numbers first. Other codes are causes
# (`diagnosis.causes`).
HAZARDS: Mapping[str, str] = {
    "nan-swallowed": "the reference is not finite where the kernel is",
    "undefined-lanes": "the result depends on masked lanes of a load without other=, which Triton leaves undefined",
    "upstream-overwritten": "backward writes into the upstream gradient",
    "less-accurate": "less accurate than the reference, and within the fence of eager PyTorch in this dtype",
    "tf32-products": "float32 factors of a product are rounded to TF32, tl.dot's default on a GPU",
    "config-variant-bits": "the bits of the result depend on which autotune config wins",
    "malformed-input": "a call that breaks the spec is neither refused nor right",
    "second-backward": "a second backward through a retained graph gives something else",
    "refuses": "the launcher refuses some cases",
    "hidden-sync": "the kernel waits for the device",
    "loose-tolerance": "the tolerance of the spec would also pass the next lower precision",
    "second-derivative": "a derivative of the gradient is missing or wrong",
}

Status = Literal["pass", "fail", "hazard", "unknown"]

# Parts of checks, as in ``without=``.
GRADIENTS = "invariance:gradients"
SECOND = "gradients:second"

# How the reason of an `unknown` begins that needs no action.
NOT_WANTED = ("not requested: ", "nothing to judge: ")


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


_NOTHING = Facts()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The conclusion of one check on one case.

    ``reason`` is one sentence. A ``hazard`` has a ``code`` of `HAZARDS` and ends no case. ``statistical``: a failure or
    hazard by a statistic, which fresh values must repeat. ``identity`` names the bug, not the case: shrinking keeps it.
    ``output``: the output, or the gradient as ``dx``. ``cause`` is one that the check itself found, ``because`` how.
    ``inner``: the check that failed under a config, compiler or stream that this check applies.
    """

    check: str
    status: Status
    reason: str = ""
    evidence: Evidence = _NOTHING
    statistical: bool = False
    identity: str = ""
    output: str = ""
    cause: str | None = None
    because: str = ""
    inner: str = ""
    code: str = ""

    @property
    def failed(self) -> bool:
        return self.status == "fail"

    @property
    def facts(self) -> dict[str, Any]:
        """The evidence as a report lists it."""
        named = {"output": self.output, "cause": self.cause, "because": self.because, "inner": self.inner}
        return {**self.evidence.as_json(), **{key: value for key, value in named.items() if value}}

    def as_json(self) -> dict[str, Any]:
        """The verdict as a note to another process."""
        return {name: getattr(self, name) for name in ("check", "status", "reason", "identity", "facts", "code")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        """The verdict of a note; its evidence is for the report alone."""
        facts = Facts(data["facts"])
        return cls(data["check"], data["status"], data["reason"], facts, identity=data["identity"], code=data["code"])


def passed(check: str, evidence: Evidence | None = None, **facts: Any) -> Verdict:
    """A pass. ``facts`` are for the report."""
    return Verdict(check, "pass", evidence=evidence or Facts(facts))


def failed(
    check: str,
    reason: str,
    *,
    identity: str = "",
    statistical: bool = False,
    output: str = "",
    cause: str | None = None,
    because: str = "",
    inner: str = "",
    evidence: Evidence | None = None,
    **facts: Any,
) -> Verdict:
    """A failure. ``facts`` are for the report, where there is no ``evidence``."""
    evidence = evidence or Facts(facts)
    return Verdict(check, "fail", reason, evidence, statistical, identity or check, output, cause, because, inner)


def hazard(check: str, code: str, reason: str, *, identity: str = "", output: str = "", **more: Any) -> Verdict:
    """A hazard: ordinary callers get right results. ``more`` is that of :func:`failed`."""
    assert code in HAZARDS, code
    found = failed(check, reason, identity=identity or f"{check}:{code}:{output}", output=output, **more)
    return replace(found, status="hazard", code=code)


def unknown(check: str, reason: str, **facts: Any) -> Verdict:
    """No verdict, for this reason. ``facts`` are for the report."""
    return Verdict(check, "unknown", reason, Facts(facts))
