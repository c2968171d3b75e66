"""How much a run spends: cases, programs a launch may have on the CPU lane, seconds one case may take."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pytest_fusion.errors import FusionError
from pytest_fusion.spec.wording import did_you_mean


@dataclass(frozen=True, slots=True)
class Profile:
    """How much to run: cases of ``covering`` and ``search``, programs of an interpreted launch, seconds of a case."""

    name: str
    covering: int
    search: int
    programs: int
    seconds: float
    elements: int = 1 << 17
    # Of a case on the CPU lane with no long dim. With two dims one case of nine was above what `dev` has, took half of
    # the test's time, and no planted bug needs it.
    usual_elements: int = 1 << 17
    work: int = 1 << 21
    # Adds cases in which one dim is long to those of the covering phase.
    long: bool = True
    # Only cases whose offsets do not fit 32 bits, `covering` of them.
    large: bool = False
    # The run needs few cases.
    few: bool = False
    # Seconds of the processor for the cases of one test. On a GPU compiling takes most of them; once Triton's cache has
    # the kernels, the fewer seconds that are for everything else end the test.
    budget_s: float = math.inf
    gpu_budget_s: float = math.inf
    gpu_compiled_s: float = math.inf

    @property
    def counted(self) -> Profile:
        """This profile without a budget: its cases alone say how much is run, on any machine."""
        return self.within(math.inf)

    def within(self, seconds: float) -> Profile:
        """This profile with another budget, on any device."""
        return replace(self, budget_s=seconds, gpu_budget_s=seconds, gpu_compiled_s=seconds)

    def budget_on(self, device: str) -> tuple[float, float]:
        """The budget of a test on a device of this type, in seconds of the processor: in all, and without compiling."""
        return (self.budget_s, self.budget_s) if device == "cpu" else (self.gpu_budget_s, self.gpu_compiled_s)


# A program costs about 0.7 ms alone, a twentieth of that in a batch. Launches that cannot be batched and slow rows
# (`Pace`) have caps of their own. With a program for each row of three dims, 39 of 193 cases have over 2000 programs,
# 23 over 4000, 14 over 7000. These numbers keep a row-wise test under 10 s on two cores. `deep` is for nightly runs.
# `gate` is for runs that only measure: a plainly wrong kernel gets no numbers.
PROFILES: dict[str, Profile] = {
    "gate": Profile("gate", covering=20, search=0, programs=2000, seconds=15.0, elements=1 << 14, long=False, few=True),
    "dev": Profile(
        "dev",
        covering=130,
        search=30,
        programs=4000,
        seconds=15.0,
        usual_elements=1 << 15,
        budget_s=6.0,
        gpu_budget_s=15.0,
        gpu_compiled_s=5.0,
    ),
    "ci": Profile("ci", covering=150, search=60, programs=7000, seconds=60.0),
    "deep": Profile("deep", covering=1000, search=1000, programs=70_000, seconds=600.0, elements=1 << 21, work=1 << 25),
    # A case takes a few small launches; on a GPU it needs some 25 GB for a moment.
    "large": Profile("large", covering=12, search=0, programs=4000, seconds=120.0, large=True),
}


def profile(name: str) -> Profile:
    """The profile of this name. Raises ``FusionError`` for an unknown one."""
    if name not in PROFILES:
        raise FusionError(f"unknown profile {name!r}{did_you_mean(name, PROFILES)}")
    return PROFILES[name]
