"""`Ran`: the result of one kernel on one case, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from pytest_fusion.checks.context import CaseResult
from pytest_fusion.checks.rejections import (
    DRY_RUN,
    IMPOSSIBLE,
    NO_ROOM_TO_JUDGE,
    NOT_MODELLED,
    OUT_OF_MEMORY,
    TOO_EXPENSIVE,
)

# Rejections that come from the device or the reference and not from the kernel.
_NOT_JUDGED = (IMPOSSIBLE, TOO_EXPENSIVE, OUT_OF_MEMORY, NO_ROOM_TO_JUDGE, NOT_MODELLED, DRY_RUN)
# The rejection of a case that the incumbent's spec does not have.
FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Ran:
    """The verdict of the plugin's checks on one case.

    ``check`` is the one that failed, or the kind of a rejection; ``refused`` is True for a rejection by the kernel
    itself (an exception in ``rejects=``) and False if the case could not be judged. ``varies``: outputs differ from run
    to run, as ``deterministic=`` allows. ``ratio`` is the worst error over the allowed one. ``work`` counts Triton
    launches and operators of torch in the case's first call, ``triton`` is True if there was a launch. ``seed`` is that
    of the case that shows the failure.
    """

    verdict: Literal["pass", "fail", "rejected"]
    check: str = ""
    reason: str = ""
    refused: bool = False
    varies: bool = False
    ratio: float | None = None
    work: int = 0
    triton: bool = False
    seed: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The result in JSON types, without default values."""
        return {"verdict": self.verdict, **{k: v for k, v in asdict(self).items() if v != _DEFAULTS.get(k)}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ran:
        return cls(**data)


_DEFAULTS = asdict(Ran("pass"))


def ran(result: CaseResult, refusals: Mapping[str, str]) -> Ran:
    """The result of a judged case; ``refusals`` has a sentence for each kind of rejection."""
    kind = result.rejected
    triton = any(launch.programs for launch in result.launches)
    if kind is not None:
        not_judged = kind in _NOT_JUDGED or kind.startswith(("reference ", "inputs "))
        return Ran("rejected", kind, refusals.get(kind, ""), refused=not not_judged, work=result.work, triton=triton)
    failure = result.failure
    found = Ran(
        "pass",
        varies=any(v.check == "repeat" and v.status == "unknown" and "varies" in v.reason for v in result.verdicts),
        ratio=_finite(result.ratio),
        work=result.work,
        triton=triton,
    )
    if failure is None:
        return found
    return replace(found, verdict="fail", check=failure.check, reason=failure.reason, seed=result.case.seed)


def died(what: str, *, late: bool = False) -> Ran:
    """The result of a kernel whose process ended, or gave no answer in time, as may happen on a busy machine."""
    return Ran("rejected", "too-slow", what) if late else Ran("fail", "crash", what)


def _finite(value: float | None) -> float | None:
    """The value as JSON allows it: ``None`` for NaN, and 1e300 for infinity."""
    return None if value is None or value != value else min(value, 1e300)
