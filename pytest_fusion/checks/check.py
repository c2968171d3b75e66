"""`Check`: what the package knows about one check."""

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

    ``run`` judges a case that passed all earlier checks of the registry; without it, the case's own calls conclude
    (`trial`). ``due``: whether it runs on this case; checks that make calls run on few. ``missing`` is why it cannot
    run for a spec on a device, which makes it `unknown`.

    After the last case ``summary`` replaces the cases' verdicts in the report. ``conclude``, given the number of judged
    cases, adds one that may fail the test; with ``beside``, also after a failure. ``notes`` are sentences for the
    report. ``closes``: whether it needs one more case at the end (`Focus.closing`).

    ``cause`` is the slug, without experiments, of a verdict that names none; ``causes`` describes slugs that
    `diagnosis.causes` lacks. ``without={"name:part": ...}`` switches ``parts`` off. A check that is not ``reported``
    concludes under the names of others.
    """

    name: str
    run: Callable[[Trial], Verdict] | None = None
    due: Callable[[Trial], bool] = lambda _: True
    missing: Callable[[FusionSpec, torch.device], str | None] = lambda _, __: None
    summary: Callable[[Context], Verdict | None] = lambda _: None
    conclude: Callable[[Context, int], Verdict | None] = lambda _, __: None
    beside: bool = False
    notes: Callable[[Context], list[str]] = lambda _: []
    closes: Callable[[Context], bool] = lambda _: False
    cause: Callable[[Verdict], str | None] = lambda _: None
    causes: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    reported: bool = True
