"""`Check`: everything that the rest of the package knows about one check, in one object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from pytest_fusion.checks.context import Context
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict
from pytest_fusion.spec.fusion_spec import FusionSpec


@dataclass(frozen=True, slots=True)
class Check:
    """One check: when it runs, what it runs, and what its verdicts mean.

    ``run`` judges a case that every check before it in the registry passed; a check without it is one that the case's
    own calls conclude (`trial`). ``due`` says whether it runs on this case: a check that makes calls runs on few.
    ``missing`` is the reason why it cannot run at all for a spec on a device, which makes it `unknown`.

    After the last case ``summary`` is the verdict that the report shows instead of those of the cases, and
    ``conclude``, given the number of judged cases, one more that may fail the test; where ``beside``, also of a test
    that failed. ``notes`` are sentences for the report. ``closes`` asks for one more case in the end (`Focus.closing`).

    ``cause`` is the slug that a verdict stands for without experiments, by default the one that the check found by
    itself; ``causes`` describes those slugs that `diagnosis.causes` does not have. ``parts`` can be switched
    off by themselves, as ``without={"name:part": ...}``. A check that is not ``reported`` concludes under the names of
    others.
    """

    name: str
    run: Callable[[Trial], Verdict] | None = None
    due: Callable[[Trial], bool] = lambda _: True
    missing: Callable[[FusionSpec, torch.device], str | None] = lambda _, __: None
    summary: Callable[[Context], Verdict | None] = lambda _: None
    conclude: Callable[[Context, int], Verdict | None] = lambda _, __: None
    beside: bool = False
    notes: Callable[[Context], list[str]] = lambda _: []
    closes: Callable[[FusionSpec, torch.device], bool] = lambda _, __: False
    cause: Callable[[Verdict], str | None] = lambda verdict: verdict.cause
    causes: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    reported: bool = True
