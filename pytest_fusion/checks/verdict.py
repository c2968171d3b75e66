"""What a check concludes, as plain data: no tensor, so that it survives xdist and a forked child."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["pass", "fail", "unknown"]

# Parts of checks, as ``without=`` names them.
GRADIENTS = "invariance:gradients"
SECOND = "gradients:second"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The conclusion of one check on one case.

    ``reason`` is one sentence for people. ``evidence`` holds JSON types only. ``statistical`` marks a
    failure that rests on a statistic and must be repeated by fresh values before it counts.
    ``identity`` names the bug rather than the case: shrinking stays on one identity.
    """

    check: str
    status: Status
    reason: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    statistical: bool = False
    identity: str = ""

    @property
    def failed(self) -> bool:
        return self.status == "fail"


def passed(check: str, **evidence: Any) -> Verdict:
    return Verdict(check, "pass", evidence=evidence)


def failed(check: str, reason: str, *, identity: str = "", statistical: bool = False, **evidence: Any) -> Verdict:
    return Verdict(check, "fail", reason, evidence, statistical, identity or check)


def unknown(check: str, reason: str, **evidence: Any) -> Verdict:
    return Verdict(check, "unknown", reason, evidence)
