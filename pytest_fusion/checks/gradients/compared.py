"""Gradients of one backward against the reference's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from pytest_fusion.checks import values_check
from pytest_fusion.checks.gradients import blame
from pytest_fusion.checks.gradients.backward import NAME, Attempt, Backward
from pytest_fusion.checks.gradients.upstream import NoGraph, Upstream
from pytest_fusion.checks.kernels import tf32
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, WrongGradient, failed
from pytest_fusion.oracle import OutputLanes
from pytest_fusion.oracle.reference import FEW_LANES, MANY_LANES, ReferenceFailed
from pytest_fusion.oracle.rounding import factors_in_tf32
from pytest_fusion.oracle.tolerance import ValuesVerdict


def compare(trial: Trial, upstream: Upstream, backward: Backward, few: Mapping[str, OutputLanes]) -> Iterator[Verdict]:
    """The failure, or hazard, of every gradient that differs from the reference's."""

    def wrong(reason: str, slug: str, **more: Any) -> Verdict:
        return failed(NAME, f"{reason}; the upstream gradient is {upstream.words()}", identity=f"{NAME}:{slug}", **more)

    for name in upstream.wanted:
        got = backward.gradients[name]
        if name not in few:
            if got is not None and bool((got != 0).any()):
                trial.result.differs = (f"d{name}", got.detach() != 0)
                yield wrong(f"{name} has a gradient though no output of the reference depends on it", f"extra:{name}")
            continue
        native = upstream.native[name]
        if got is None:
            if bool((native != 0).any()):
                yield wrong(
                    f"no gradient came back for {name}, whose reference gradient is not zero",
                    f"missing:{name}",
                    cause="gradient-missing",
                    output=f"d{name}",
                )
            continue
        if got.shape != native.shape or got.dtype != native.dtype:
            ours, theirs = (f"{tuple(t.shape)} {t.dtype}" for t in (got, native))
            yield wrong(f"the gradient of {name} is {ours}, the reference's {theirs}", f"structure:{name}")
            continue
        with trial.context.clock.phase("judge"):
            judge = partial(_judged, trial, upstream, name, got.detach(), few[name])
            judged = tf32.judged(trial.context, native, judge)
        for swallowed in values_check.swallowed(NAME, {f"d{name}": judged}):
            trial.note(swallowed)
        if judged.ok:
            continue
        evidence = WrongGradient(
            deviation=values_check.deviation(judged),
            upstream=upstream.kind,
            layouts={used: upstream.layout[used].kind for used in upstream.used},
            upstream_strides={used: upstream.strides(used) for used in upstream.used},
            wanted=list(upstream.wanted),
            ratio_to_right=blame.constant_ratio(got, few[name].oracle),
        )
        reason, output = f"gradient of {name}: {judged.reason}", f"d{name}"
        found = values_check.less_accurate(NAME, reason, judged, output, evidence)
        if judged.grade == "D":
            slug, chance = f"{name}:{values_check.kind_of(judged)}", judged.statistical
            found = wrong(reason, slug, statistical=chance, output=output, evidence=evidence)
        if found.failed or found.identity == trial.context.focus.sought:
            trial.result.evidence = (output, got.detach(), judged.by or native)
        yield found


def _judged(trial: Trial, upstream: Upstream, name: str, got: torch.Tensor, few: OutputLanes) -> ValuesVerdict:
    return values_check.judge_one(
        got,
        upstream.native[name],
        upstream.lanes(FEW_LANES)[name] if factors_in_tf32() else few,
        lambda: upstream.lanes(MANY_LANES)[name],
        trial.spec.tolerance,
        infinite=trial.infinite,
        wide=(lambda: upstream.lanes(MANY_LANES, "F")[name]) if trial.narrow else None,
        eager=(lambda: upstream.eager(name)) if trial.narrow else (lambda: None),
        size=upstream.size(name),
    )


def judging(trial: Trial) -> blame.Right:
    """A function: whether an attempt's gradients are right for given upstream gradients."""

    def right(attempt: Attempt, upstream: Upstream) -> bool | None:
        if attempt.backward is None or attempt.ended() is not None:
            return None
        evidence, differs = trial.result.evidence, trial.result.differs
        try:
            return not any(v.failed for v in compare(trial, upstream, attempt.backward, upstream.lanes(FEW_LANES)))
        except (NoGraph, ReferenceFailed):
            return None
        finally:
            trial.result.evidence, trial.result.differs = evidence, differs

    return right
