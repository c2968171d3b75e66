"""The conclusion of a check, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pytest_fusion.checks.evidence import Evidence, Facts
from pytest_fusion.checks.hazards import HAZARDS

Status = Literal["pass", "fail", "hazard", "unknown"]

# Parts of checks, as in ``without=``.
GRADIENTS = "invariance:gradients"
SECOND = "gradients:second"

# How the reason of an `unknown` begins that needs no action.
NOT_WANTED = ("not requested: ", "nothing to judge: ")

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
