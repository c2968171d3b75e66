"""Runs one planted bug or one honest kernel through the judge and says whether the verdict was right."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_fusion.engine import minimum
from pytest_fusion.engine.profiles import PROFILES
from pytest_fusion.plugin.testing import examine
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run import device_choice
from tests.quality.honest import HONEST
from tests.quality.plant import Plant
from tests.quality.plants import PLANTS

BY_NAME: Mapping[str, Plant] = {plant.name: plant for plant in PLANTS}
DEVICE = device_choice.choose("auto")
# What a planted bug may take to find and to shrink, in seconds on one core.
TIME_LIMIT = 10.0
# How often the cause must be one that a knowledgeable person would give.
RIGHT_CAUSES = 0.9
# Causes of planted bugs for which a hazard of this code is the right answer too.
HAZARDS_OF: Mapping[str, frozenset[str]] = {
    "less-accurate": frozenset({"low-precision-accumulation", "cast-order"}),
    "undefined-lanes": frozenset({"wrong-neutral-element", "reads-padding"}),
    "upstream-overwritten": frozenset({"mutates-input"}),
    "nan-swallowed": frozenset({"nan-mishandled"}),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What the judge said of one planted bug with one seed; ``trouble`` is empty when it was right."""

    plant: Plant
    seed: int
    record: TestRecord
    trouble: str

    @property
    def dims(self) -> Mapping[str, int]:
        return _dims(self.record)

    @property
    def worst(self) -> Mapping[str, Any]:
        """The worst finding; one of no level where nothing was found."""
        return _worst(self.record)

    @property
    def cause(self) -> str:
        return str(self.worst["code"])

    @property
    def cause_is_right(self) -> bool:
        return not self.plant.causes.isdisjoint({self.cause, *HAZARDS_OF.get(self.cause, ())})


@dataclass(frozen=True, slots=True)
class Alarms:
    """What the judge said of one honest kernel over several seeds: cases judged and the records that accuse it."""

    name: str
    cases: int
    seconds: float
    accusations: tuple[TestRecord, ...]
    hazards: tuple[str, ...] = ()


def lacking(plant: Plant) -> str:
    """Why a bug cannot be shown here; empty where it can."""
    if plant.profile not in PROFILES:
        return f"there is no profile {plant.profile!r}"
    return lacking_device(plant.needs)


def lacking_device(needs: str) -> str:
    """Why what needs ``"cuda"`` or ``"two GPUs"`` cannot run here; empty where it can."""
    least = {"": 0, "cuda": 1, "two GPUs": 2}[needs]
    return "" if device_choice.cuda_devices() >= least else f"needs {needs}"


def share_of_right_causes(right: Iterable[bool]) -> float:
    """The share of runs with a right cause; 1 where there was none."""
    told = list(right)
    return sum(told) / len(told) if told else 1.0


def _worst(record: TestRecord) -> Mapping[str, Any]:
    found = record.findings[0] if record.findings else None
    return found or {
        "level": "",
        "check": record.failed_check or "",
        "code": record.cause or "unexplained",
        "case": None,
    }


def _dims(record: TestRecord) -> Mapping[str, int]:
    """The sizes of the smallest case; of a batch its rows."""
    case = _worst(record)["case"]
    dims = {} if case is None else case["dims"]
    return {name: math.prod(size) if isinstance(size, list) else size for name, size in dims.items()}


def _trouble(plant: Plant, record: TestRecord) -> str:
    found = _worst(record)
    if not found["level"] and record.verdict != "fail":
        return f"missed: {record.verdict} after {record.cases} cases"
    if found["check"] not in plant.expect_checks:
        return f"caught by {found['check']}, expected one of {sorted(plant.expect_checks)}"
    if not plant.is_shrunk(_dims(record)):
        return f"shrunk to {dict(_dims(record))}, allowed {[dict(limits) for limits in plant.allowed()]}"
    return ""


def examine_plant(name: str, seed: int, *, explain: bool = True) -> Finding:
    """What is found of this plant; unless ``explain``, without experiments for the cause, half of the time."""
    plant = BY_NAME[name]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not explain:
            patch.setattr(minimum, "diagnose", lambda lab: None)
        record = examine(
            plant.make_spec(), seed=seed, profile=plant.profile, device=DEVICE, first=True, root=Path(folder)
        )
    return Finding(plant, seed, record, _trouble(plant, record))


def examine_honest(name: str, cases: int, seed: int = 0, *, profile: str = "dev") -> Alarms:
    """Seeds from ``seed`` on until ``cases`` cases were judged."""
    done, seconds, accusations, hazards = 0, 0.0, [], []
    while done < cases:
        with tempfile.TemporaryDirectory() as folder:
            record = examine(
                HONEST[name](),
                seed=seed,
                profile=profile,
                device=DEVICE,
                max_cases=cases - done,
                root=Path(folder),
            )
        seconds += record.seconds
        if record.verdict != "pass":
            accusations.append(record)
        hazards += [f"{one['code']}: {one['message']}" for one in record.findings if one["level"] == "hazard"]
        # An accusation ends its run early; the next seed goes on.
        done += max(record.cases, 1)
        seed += 1
    return Alarms(name, done, seconds, tuple(accusations), tuple(hazards))
