"""`Ran`: what one kernel did with one case, as plain data."""

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

# Rejections that say something of the lane or of the reference, and nothing of the kernel.
_NOT_ASKED = (IMPOSSIBLE, TOO_EXPENSIVE, OUT_OF_MEMORY, NO_ROOM_TO_JUDGE, NOT_MODELLED, DRY_RUN)
# The rejection of a case that the incumbent's spec does not know.
FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Ran:
    """The verdict of the plugin's checks on one case.

    ``check`` is the one that failed, or the kind of a rejection; ``refused`` tells a rejection by the kernel itself
    (an exception in ``rejects=``) from a case that nobody could ask. ``varies``: outputs that differ from run to run,
    as ``deterministic=`` allows. ``ratio`` is the worst error over what was allowed. ``work`` counts Triton launches
    and operators of torch in the case's first call, ``triton`` tells whether there was one of the former. ``seed`` is
    that of the case that shows the failure.
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
        """Without what is as it is in every passing case."""
        return {"verdict": self.verdict, **{k: v for k, v in asdict(self).items() if v != _DEFAULTS.get(k)}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ran:
        return cls(**data)


_DEFAULTS = asdict(Ran("pass"))


def ran(result: CaseResult, refusals: Mapping[str, str]) -> Ran:
    """What a judged case says; ``refusals`` has a sentence for each kind of rejection."""
    kind = result.rejected
    triton = any(launch.programs for launch in result.launches)
    if kind is not None:
        asked_nothing = kind in _NOT_ASKED or kind.startswith(("reference ", "inputs "))
        return Ran("rejected", kind, refusals.get(kind, ""), refused=not asked_nothing, work=result.work, triton=triton)
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
    """A kernel whose process ended; or gave no answer in time, which a busy machine does too."""
    return Ran("rejected", "too-slow", what) if late else Ran("fail", "crash", what)


def _finite(value: float | None) -> float | None:
    """JSON has no infinity; a ratio that large says no more than 1e300."""
    return None if value is None or value != value else min(value, 1e300)
