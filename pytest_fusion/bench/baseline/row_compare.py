"""A row of today beside the stored one: exact facts first, then golden outputs, then latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pytest_fusion.bench.baseline.codec import Baseline
from pytest_fusion.bench.baseline.facts import (
    RECOMPILES,
    Change,
    affects_speed,
    compare_facts,
    compare_names,
    compare_reasons,
    group,
)
from pytest_fusion.bench.baseline.latency_judge import Judgement, Noise, Question, against_stored, judge, level, worth
from pytest_fusion.bench.baseline.row import Key, Row, elsewhere, renewed
from pytest_fusion.bench.output_digest import GoldenChange, GoldenStatus, compare_golden

RowStatus = Literal["regressed", "missing", "unknown", "inconclusive", "changed", "improved", "new", "same"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of one row. ``facts`` are all exact facts of either side, ``names`` the kernels and ``reasons`` the
    causes of compilations that came or went, ``changes`` the differences in brief with their verdicts. ``context`` has
    versions that may explain them. ``question`` is still to be judged with the rest of the run (see :func:`judged`) and
    gives ``latency``; ``no_latency`` says why there is none."""

    key: Key
    verdict: RowStatus
    reason: str = ""
    facts: tuple[Change, ...] = ()
    names: str = ""
    reasons: str = ""
    golden: tuple[GoldenChange, ...] = ()
    latency: Judgement | None = None
    question: Question | None = None
    no_latency: str = ""
    changes: tuple[tuple[RowStatus, str], ...] = ()
    context: str = ""

    @property
    def failed(self) -> bool:
        """Whether the test fails: the row regressed, or a required baseline is missing."""
        return self.verdict in ("regressed", "missing")


def compare(
    row: Row, stored: Baseline | None, *, machine: Noise | None = None, ci: bool = False, command: str = ""
) -> Comparison:
    """One row of this run beside its baseline. Without a stored row the verdict is ``"missing"``, a failure, in ``ci``,
    else ``"new"``; ``command`` makes one. Without ``machine``, the noise of A/A runs, no latency is judged."""
    before = stored.rows.get(row.key) if stored is not None else None
    if before is None:
        make = f"make it with: {command or 'pytest --fusion-bench --fusion-update new'}"
        where = f"there is no baseline of it on {row.device}"
        if ci and row.judged:
            return Comparison(row.key, "missing", f"{where}, and this run is in CI; {make}, and commit the file")
        return Comparison(row.key, "new", f"{where}; {make}")
    context = renewed(before.environment, row.environment)
    methods = before.methods, row.methods
    facts = compare_facts(before.facts, row.facts, judged=row.judged, methods=methods, context=context)
    counted = row.names or any(group(fact) == "launches" for fact in row.facts)
    names = compare_names(before.names, row.names) if counted else ""
    # An older baseline has no reasons.
    known = bool(before.reasons) or before.facts.get(RECOMPILES) == 0
    reasons = compare_reasons(before.reasons, row.reasons) if known and RECOMPILES in row.facts else ""
    question = _question(row, before, machine)
    found = Comparison(
        row.key,
        "same",
        facts=tuple(facts),
        names=names,
        reasons=reasons,
        golden=tuple(compare_golden(before.golden, row.golden)),
        question=question if isinstance(question, Question) else None,
        no_latency=question if isinstance(question, str) else "",
        context=context,
    )
    return _concluded(found)


def judged(found: Sequence[Comparison], *, family: int | None = None) -> list[Comparison]:
    """The comparisons of a run with their latencies judged together; ``family`` as in ``judge.judge``."""
    questions = [one.question for one in found if one.question is not None]
    answers = iter(judge(questions, family=family))
    return [_concluded(replace(one, latency=next(answers))) if one.question is not None else one for one in found]


def _question(row: Row, before: Row, machine: Noise | None) -> Question | str:
    """The question about the latency, or why there is none; empty if neither side has a latency to judge."""
    now, then = row.latency, before.latency
    if not row.judged or (now is None and then is None):
        return ""
    if now is None:
        return "this run measured none, and the baseline has one"
    if then is None:
        return "the baseline has no latency; add it with --fusion-update new"
    other = elsewhere(then.place, now.place)
    if other:
        return f"latency compares only on one class of machine and software: {other}"
    if then.control != now.control:
        return "the reference is not the one of the baseline, so the ratio to it means something else"
    names = sorted({*then.method, *now.method})
    ways = [name for name in names if then.method.get(name) != now.method.get(name)]
    if ways:
        was, is_ = then.method.get(ways[0]), now.method.get(ways[0])
        return f"it was timed in another way: {ways[0]} {was or 'unknown'} then, {is_ or 'unknown'} now"
    if machine is None:
        return "this machine was not measured against itself, so no latency is judged"
    aa = max(then.aa or 0.0, machine.spread)
    return against_stored(now, worth(level(then, now.unit, aa), then, now), machine)


def _concluded(found: Comparison) -> Comparison:
    """The comparison with its verdict, the worst of its parts, and their reasons."""
    changed = [change for change in found.facts if change.verdict != "same"]
    statuses: list[tuple[RowStatus, str]] = [(change.verdict, _sentence(change)) for change in changed]
    statuses += [(_GOLDEN[one.verdict], f"golden output {one.name}: {one.reason}") for one in found.golden]
    if found.names:
        # Names explain a changed number of launches. With an equal number they mean other kernels.
        own = (change.verdict for change in changed if group(change.fact) == "launches")
        counted: RowStatus = next(own, "changed")
        statuses.append((counted, f"kernels: {found.names}"))
    if found.reasons:
        own = (change.verdict for change in changed if change.fact == RECOMPILES)
        again: RowStatus = next(own, "changed")
        statuses.append((again, f"compiled again for other reasons: {found.reasons}"))
    if found.latency is not None:
        one = found.latency
        change = f"{one.change:+.2f} % ({one.low:+.2f} to {one.high:+.2f} %)"
        statuses.append((one.verdict, f"latency: {change}, {one.verdict}: {one.reason}"))
    elif found.no_latency:
        statuses.append(("unknown", f"latency: {found.no_latency}"))
    others = [status for status in statuses[len(changed) :] if status[0] in _SHOWN]
    telling = sorted(changed, key=lambda change: not affects_speed(change.fact))
    briefs = ((change.verdict, _briefly(change, found.context)) for change in telling)
    found = replace(found, changes=(*others, *(brief for brief in briefs if brief[0] in _SHOWN)))
    if not statuses and not found.facts and not found.golden:
        return replace(found, verdict="unknown", reason="nothing was measured that the baseline has")
    for status in _WORST_FIRST:
        texts = [text for own, text in statuses if own == status]
        if texts and status != "same":
            return replace(found, verdict=status, reason="; ".join(texts))
    return replace(found, verdict="same")


# Changed golden outputs are a failure; a drift within rounding is reported only.
_GOLDEN: dict[GoldenStatus, RowStatus] = {
    "changed": "regressed",
    "unknown": "unknown",
    "within": "changed",
    "same": "same",
}
_WORST_FIRST: tuple[RowStatus, ...] = ("regressed", "unknown", "inconclusive", "changed", "improved", "same")

# Listed below the table; an inconclusive latency is in its row already.
_SHOWN = frozenset(("regressed", "unknown", "changed", "improved"))


def _briefly(change: Change, context: str) -> str:
    """A sentence with the fact before and now, or why it is unknown."""
    if change.verdict == "unknown":
        return _sentence(replace(change, reason=change.reason.removesuffix(context)))
    return _sentence(replace(change, reason=""))


def _sentence(change: Change) -> str:
    def shown(value: int | None) -> str:
        return "none" if value is None else str(value)

    reason = f" ({change.reason})" if change.reason else ""
    if change.before is None and change.now is None:
        return f"{change.fact}{reason}"
    return f"{change.fact} {shown(change.before)} -> {shown(change.now)}{reason}"
