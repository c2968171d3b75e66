"""`Ran`: the result of one kernel on one case; `Pair`: both results, and the candidate's standing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from pytest_fusion.checks.context import CaseResult
from pytest_fusion.checks.verdict import (
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
    """The verdict of the checks on one case; ``check`` is the failed one, or the kind of a rejection. ``refused``: the
    kernel itself rejects the case (``rejects=``); else the case could not be judged. ``varies``: outputs differ from
    run to run, as ``deterministic=`` allows. ``ratio``: the worst error over the allowed one. ``work``: Triton launches
    and operators of torch in the first call; ``triton``: there was a launch. ``seed``: of the case that fails.
    ``hazards``: codes that the spec does not accept."""

    verdict: Literal["pass", "fail", "rejected"]
    check: str = ""
    reason: str = ""
    refused: bool = False
    varies: bool = False
    ratio: float | None = None
    work: int = 0
    triton: bool = False
    seed: int | None = None
    hazards: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """The result in JSON types, without default values."""
        return {"verdict": self.verdict, **{k: v for k, v in asdict(self).items() if v != _DEFAULTS.get(k)}}


_DEFAULTS = asdict(Ran("pass"))


def ran(result: CaseResult, refusals: Mapping[str, str], accepted: Collection[str] = ()) -> Ran:
    """The result of a judged case, with a sentence of ``refusals`` for a rejection, without ``accepted`` hazards."""
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
        hazards=sorted({v.code for v in result.verdicts if v.status == "hazard" and v.code not in accepted}),
    )
    if failure is None:
        return found
    return replace(found, verdict="fail", check=failure.check, reason=failure.reason, seed=result.case.seed)


def died(what: str, *, late: bool = False) -> Ran:
    """The result of a kernel whose process ended, or gave no answer in time, as can happen on a busy machine."""
    return Ran("rejected", "too-slow", what) if late else Ran("fail", "crash", what)


def _finite(value: float | None) -> float | None:
    """The value as JSON allows it: ``None`` for NaN, and 1e300 for infinity."""
    return None if value is None or value != value else min(value, 1e300)


# ``passes``: both do. ``worse``: only the candidate fails. ``better``: only the incumbent fails. ``known-bad``: both
# fail alike. ``both-fail``: by different checks, or the candidate by far more. ``refuses`` and ``accepts``: only the
# candidate refuses, or takes, the case. ``not-asked``: one or both could not be judged. ``foreign``: the two got
# different inputs. ``unexcused``: the candidate fails, and the incumbent could not be judged.
Standing = Literal[
    "worse", "unexcused", "both-fail", "refuses", "known-bad", "better", "accepts", "passes", "foreign", "not-asked"
]
STANDINGS: tuple[Standing, ...] = get_args(Standing)
Source = Literal["fuzzed", "example", "pinned", "known", "recorded"]

# A failure by values is known if the candidate's error is at most so many times the incumbent's.
_FAR_WORSE = 2.0


@dataclass(frozen=True, slots=True)
class Pair:
    """Both kernels on one case. ``case`` is its JSON where reports need it. ``errors`` by output, ``launches`` and
    ``memory`` (bytes) are (candidate's, incumbent's), ``None`` if one is not known. The candidate launches the kernels
    in ``more`` more often. ``unmeasured`` is the reason why errors are missing."""

    text: str
    source: Source
    candidate: Ran
    incumbent: Ran
    standing: Standing
    reason: str = ""
    case: Mapping[str, Any] | None = None
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    launches: tuple[int, int] | None = None
    more: str = ""
    memory: tuple[int, int] | None = None
    unmeasured: str = ""

    def as_json(self) -> dict[str, Any]:
        """The pair in JSON types, without unknown values; ``text`` and ``reason`` are always present."""
        data = {name: getattr(self, name) for name in self.__slots__}
        data |= {"candidate": self.candidate.as_json(), "incumbent": self.incumbent.as_json()}
        return {name: value for name, value in data.items() if value or name in ("text", "reason")}


def classify(candidate: Ran, incumbent: Ran) -> tuple[Standing, str]:
    """The standing of a case, and the reason for it."""
    ours, theirs = candidate.verdict, incumbent.verdict
    if ours == "fail" and theirs == "rejected" and not incumbent.refused:
        failed = f"{candidate.check}: {candidate.reason}"
        return "unexcused", f"{failed}; the incumbent was not judged: {_rejected(incumbent)}"
    if incumbent.check == FOREIGN:
        return "foreign", incumbent.reason
    if ours == theirs == "pass":
        return "passes", ""
    if ours == theirs == "fail":
        return _both_fail(candidate, incumbent)
    if ours == "fail" and theirs == "pass":
        return "worse", f"{candidate.check}: {candidate.reason}"
    if ours == "pass" and theirs == "fail":
        return "better", f"the incumbent fails {incumbent.check}: {incumbent.reason}"
    if ours == "rejected":
        if candidate.refused and theirs == "pass":
            return "refuses", f"{candidate.check}: {candidate.reason}"
        return "not-asked", _rejected(candidate)
    if not incumbent.refused:
        return "not-asked", f"the incumbent was not judged: {_rejected(incumbent)}"
    if ours == "fail":
        # A refused call can be served by something else; a wrong result is used.
        return "worse", f"the incumbent refuses ({incumbent.check}); {candidate.check}: {candidate.reason}"
    return "accepts", f"the incumbent refuses ({incumbent.check})"


def _both_fail(candidate: Ran, incumbent: Ran) -> tuple[Standing, str]:
    if candidate.check != incumbent.check:
        how = f"the candidate fails {candidate.check} ({candidate.reason}), the incumbent {incumbent.check}"
        return "both-fail", how
    if candidate.check == "values":
        ours, theirs = candidate.ratio, incumbent.ratio
        if ours is not None and theirs is not None and ours > _FAR_WORSE * theirs:
            by = f"the candidate by {ours:.3g} times the allowed and the incumbent by {theirs:.3g}"
            return "both-fail", f"both fail values, {by}"
    return "known-bad", f"both fail {candidate.check}: {candidate.reason}"


def _rejected(ran: Ran) -> str:
    return f"{ran.check}: {ran.reason}".rstrip(": ")
