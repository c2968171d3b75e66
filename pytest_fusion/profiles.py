"""How much a run spends: cases, programs a launch may have on the CPU lane, seconds one case may take."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_fusion.errors import FusionError, did_you_mean


@dataclass(frozen=True, slots=True)
class Profile:
    """``covering`` and ``search`` are numbers of cases; ``programs`` caps one interpreted launch; ``seconds``
    one case.
    """

    name: str
    covering: int
    search: int
    programs: int
    seconds: float
    elements: int = 1 << 17
    work: int = 1 << 21
    # Beside those of the covering phase, cases in which one dim is long.
    long: bool = True
    # Only cases whose offsets do not fit 32 bits, `covering` of them.
    large: bool = False


# Interpreted, a program costs about 0.7 ms, so a row-wise kernel's case of 64 rows under two fills costs 0.1 s: these
# numbers keep a row-wise test under 10 s on two cores. `deep` is for a nightly run; `gate` for a run that measures what
# another run tests: a kernel that is plainly wrong has no numbers, and that is all it is good for.
PROFILES: dict[str, Profile] = {
    "gate": Profile("gate", covering=20, search=0, programs=2000, seconds=15.0, elements=1 << 14, long=False),
    "dev": Profile("dev", covering=130, search=30, programs=2000, seconds=15.0),
    "ci": Profile("ci", covering=150, search=60, programs=4000, seconds=60.0),
    "deep": Profile("deep", covering=1000, search=1000, programs=70_000, seconds=600.0, elements=1 << 21, work=1 << 25),
    # A case takes a few small launches; on a GPU it needs some 25 GB for a moment.
    "large": Profile("large", covering=12, search=0, programs=4000, seconds=120.0, large=True),
}


def profile(name: str) -> Profile:
    """Raises ``FusionError`` for an unknown name."""
    if name not in PROFILES:
        raise FusionError(f"unknown profile {name!r}{did_you_mean(name, PROFILES)}")
    return PROFILES[name]
