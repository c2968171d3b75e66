"""`TestRecord`: the result of one test in plain JSON types, so that xdist and forked children can send it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from pytest_fusion.checks.verdict import Status

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class TestRecord:
    """The result of all cases of one test.

    ``checks`` maps a check's name to ``{"verdict", "reason", "cases", ...evidence}``; of ``cases`` so many were
    ``judged``; ``rejected`` maps the kind of a rejection (an exception's name, ``"too-expensive"``) to its count, those
    that were left out before they became a case among them; ``coverage`` has ``{"pairs", "covered", "share", "few"}``,
    ``few`` where few cases were all that was wanted, and of a test whose budget was used up ``seconds``, the budget,
    and ``unmet``, a line for each level of a factor and the levels of another that it did not meet; ``worst`` has
    ``{"ratio", "output", "statistic", "case"}`` of the largest error against what was allowed; ``grade`` is ``"A"`` to
    ``"D"`` or ``None``; ``off`` maps a
    switched-off check to the user's reason; ``phases`` maps a phase (fused, reference, make, judge, plugin) to seconds;
    ``expected`` means that ``pytest.mark.xfail`` announced the failure; ``raised`` that the test ended in an error of
    the spec or of this package, which is ``"unknown"`` and fails in pytest; ``script`` is the path of the stand-alone
    script of the failing case; ``diagnosis`` of a failure has ``{"cause", "evidence", "ruled_out", "runs"}``: a slug,
    two lists of sentences, and how often the kernel ran for them; ``bench`` of a measured test has ``{"rows",
    "compared", "resources", "limits", "notes", "complete"}``; ``canary`` of one that was compared with an incumbent has
    ``{"verdict", "reasons", "metrics", "counts", "incumbent", "pairs", "latency", "notes"}``.
    ``findings`` are all that was found, worst first, each ``{"code", "check", "level", "message", "case", "replay",
    "accept", "allowed"}``: ``level`` is ``"wrong"`` or ``"hazard"``, ``accept`` the keyword that accepts it (``None``
    for what is unexplained), ``allowed`` the user's reason where the spec does, else ``None``.
    """

    __test__ = False  # a record, not a test class

    nodeid: str
    verdict: Status
    cases: int = 0
    judged: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    failed_check: str | None = None
    cause: str | None = None
    diagnosis: dict[str, Any] = field(default_factory=dict)
    case: dict[str, Any] | None = None
    replay: str | None = None
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0
    message: str = ""
    coverage: dict[str, Any] = field(default_factory=dict)
    worst: dict[str, Any] = field(default_factory=dict)
    grade: str | None = None
    off: dict[str, str] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    expected: bool = False
    raised: bool = False
    script: str | None = None
    bench: dict[str, Any] = field(default_factory=dict)
    canary: dict[str, Any] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The test's entry in ``--fusion-json``."""
        return asdict(self)
