"""`Pair`: the results of both kernels on one case, and whether the candidate may replace the incumbent there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pytest_fusion.canary.offline.ran import FOREIGN, Ran

# ``passes``: both do. ``worse``: the candidate fails where the incumbent does not. ``better``: the other way round.
# ``known-bad``: both fail alike. ``both-fail``: by different checks, or the candidate by far more. ``refuses`` and
# ``accepts``: the candidate alone refuses, or takes, the case. ``not-asked``: one or both could not be judged.
# ``foreign``: the two got different inputs. ``unexcused``: the candidate fails, and the incumbent could not be judged.
Standing = Literal[
    "passes", "worse", "better", "known-bad", "both-fail", "refuses", "accepts", "not-asked", "foreign", "unexcused"
]
STANDINGS: tuple[Standing, ...] = (
    *("worse", "unexcused", "both-fail", "refuses", "known-bad", "better", "accepts", "passes", "foreign", "not-asked"),
)
Source = Literal["fuzzed", "example", "pinned", "known", "recorded"]

# A failure by values is known when the candidate's error is at most so many times the incumbent's.
_FAR_WORSE = 2.0


@dataclass(frozen=True, slots=True)
class Pair:
    """Both kernels on one case. ``text`` describes it, ``case`` has it as JSON where reports need it.

    ``errors`` has (candidate's, incumbent's) by output; ``launches`` and ``memory`` (bytes) are pairs in that order,
    ``None`` if one is not known. ``more`` names the kernels that the candidate launches more often. ``unmeasured``
    says why there are no errors where results could have some.
    """

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
        """The pair in JSON types, without what is not known; ``text`` and ``reason`` are always there."""
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
    if ours == theirs:
        return "not-asked", _rejected(candidate)
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
        return (
            "both-fail",
            f"the candidate fails {candidate.check} ({candidate.reason}), the incumbent {incumbent.check}",
        )
    if candidate.check == "values":
        ours, theirs = candidate.ratio, incumbent.ratio
        if ours is not None and theirs is not None and ours > _FAR_WORSE * theirs:
            by = f"the candidate by {ours:.3g} times the allowed and the incumbent by {theirs:.3g}"
            return "both-fail", f"both fail values, {by}"
    return "known-bad", f"both fail {candidate.check}: {candidate.reason}"


def _rejected(ran: Ran) -> str:
    return f"{ran.check}: {ran.reason}".rstrip(": ")
