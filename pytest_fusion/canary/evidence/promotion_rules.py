"""`Metric` and `Rules`: what a candidate must show to be promoted, and what rolls it back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pytest_fusion.canary.evidence.sequential import RATE, Scale
from pytest_fusion.errors import CanaryError
from pytest_fusion.spec.wording import did_you_mean

# What a worse metric means: rollback at once; no promotion; nothing (a dry run).
Role = Literal["critical", "ordinary", "muted"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A quantity of calls whose mean is judged; more is worse.

    ``scale`` is ``RATE`` for events per call, else that of log ratios of candidate to incumbent, one per block of
    calls. Worse: the mean is above ``acceptable``. Good enough: it is below ``limit`` over all calls, after ``fewest``
    observations, and below ``bucket_limit`` in each bucket of some traffic, which has fewer, after
    ``fewest_in_bucket``. ``itself`` bounds the distance from 0 of the incumbent compared with itself (0: no test);
    promotion needs ``fewest_itself`` observations of it.
    """

    name: str
    scale: Scale
    role: Role
    acceptable: float
    limit: float
    bucket_limit: float
    fewest: int
    fewest_in_bucket: int
    itself: float = 0.0
    fewest_itself: int = 0

    def __post_init__(self) -> None:
        low, high = self.scale.low, self.scale.high
        if not low <= self.acceptable <= self.limit <= self.bucket_limit <= high:
            raise ValueError(
                f"{self.name}: acceptable {self.acceptable}, limit {self.limit} and bucket_limit {self.bucket_limit} "
                f"must rise, from {low} to {high} at most; what is acceptable cannot be more than what is promoted"
            )
        if self.limit == low:
            raise ValueError(f"{self.name}: limit is {self.limit}; nothing can be shown to be below the scale's end")
        if self.fewest < 1 or self.fewest_in_bucket < 1 or self.fewest_itself < 0:
            raise ValueError(f"{self.name}: fewest and fewest_in_bucket are 1 or more, or no data would be a pass")

    @property
    def is_rate(self) -> bool:
        return self.scale == RATE


# A latency beyond 25 % either way counts as 25 %: a shorter scale gives evidence faster, and one interrupt must not
# decide. Blocks have some 20 calls; 50 of them are Kayenta's least number of points.
LATENCY = Scale(-0.25, 0.25, 0.001)
ERROR = Scale(-math.log(4), math.log(4), math.log(4) / 200)
METRICS = (
    # No correct kernel has any: non-finite where the incumbent is finite, another structure, changed inputs, hangs.
    Metric("fault", RATE, "critical", 0.0, 1e-4, 0.02, 300, 300),
    # Beyond the tolerance calibrated offline. One in 10,000 is not promoted; one in 100,000 is not rolled back.
    Metric("violation", RATE, "critical", 1e-5, 1e-4, 0.02, 300, 300, itself=1e-5),
    Metric("exception", RATE, "critical", 1e-4, 1e-3, 0.02, 300, 300),
    Metric("error_ratio", ERROR, "ordinary", math.log(1.25), math.log(1.25), math.log(1.5), 50, 10),
    Metric("latency_ratio", LATENCY, "critical", math.log(1.03), math.log(1.03), math.log(1.10), 50, 10, 0.01, 50),
)


@dataclass(frozen=True, slots=True)
class Rules:
    """Metrics and error probabilities, which hold for a whole rollout, however often it is judged.

    ``back``: to roll back a correct candidate, shared by all metrics and buckets. ``promoted``: to promote one with a
    metric above its limit; all metrics must pass, so none needs a share (Berger, Technometrics 24, 1982).
    ``wrong_machine``: to fail a sound measurement in its A/A test. ``most_buckets`` is fixed in advance. ``traffic`` is
    the share of calls above which a bucket must pass by itself, ``broken`` the share of observations that may be NaN.
    """

    metrics: tuple[Metric, ...] = METRICS
    back: float = 0.01
    promoted: float = 0.01
    wrong_machine: float = 0.005
    most_buckets: int = 64
    traffic: float = 0.01
    broken: float = 0.01

    def __post_init__(self) -> None:
        names = [metric.name for metric in self.metrics]
        if not self.active or len(set(names)) < len(names):
            raise ValueError(f"metrics need different names, and at least one must not be muted: {names}")
        for name in ("back", "promoted", "wrong_machine", "traffic", "broken"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and it is a share between 0 and 1")
        if self.most_buckets < 1:
            raise ValueError(f"most_buckets is {self.most_buckets}; every call is in a bucket")

    @property
    def active(self) -> tuple[Metric, ...]:
        """The metrics that count for the verdict."""
        return tuple(metric for metric in self.metrics if metric.role != "muted")

    def scales(self) -> dict[str, Scale]:
        """The scale of each metric, for a ``Collector``."""
        return {metric.name: metric.scale for metric in self.metrics}


RULES = Rules()


def without(rules: Rules, names: Sequence[str]) -> Rules:
    """The same rules with these metrics muted: reported, but not judged. Raises ``CanaryError``."""
    known = [metric.name for metric in rules.metrics]
    for name in names:
        if name not in known:
            raise CanaryError(f"{name!r} is no metric of the judge{did_you_mean(name, known)}")
    if set(names) >= set(known):
        raise CanaryError("without any metric there is nothing to judge by")
    metrics = tuple(replace(one, role="muted") if one.name in names else one for one in rules.metrics)
    return replace(rules, metrics=metrics)
