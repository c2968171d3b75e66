"""`Row`: what was measured of one case of one test, and where; plain data, JSON both ways."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

from pytest_fusion.run.measure.timing.roofline import Activity

MODELLED = "cpu (modelled)"
# Latency is compared only if all of these are equal; with their names in messages.
_LATENCY = {
    "gpu": "GPU",
    "cpu": "CPU",
    "capability": "compute capability",
    "mig": "MIG profile",
    "driver": "driver",
    "torch": "torch",
    "triton": "triton",
}


def device_class(environment: Mapping[str, Any]) -> str:
    """``"cpu (modelled)"``, or the GPU's name and ``capability`` (``"9.0"``): ``"NVIDIA H200 (sm_90)"``. Raises
    ``ValueError`` for a GPU without a name: its facts would be taken for those of any other."""
    if environment.get("lane") != "cuda":
        return MODELLED
    name, capability = environment.get("device_name"), environment.get("capability")
    if not name:
        raise ValueError("this GPU has no name, so its facts cannot be distinguished from those of other GPUs")
    return f"{name} (sm_{str(capability).replace('.', '')})" if capability else str(name)


def latency_place(environment: Mapping[str, Any]) -> dict[str, str]:
    """What must be equal for two latencies to be compared. torch and Triton lose the patch release, which rarely
    changes generated code. The driver counts by its first part (``"580"`` of ``"580.65.06"``): it is renewed with its
    machine."""
    parts = {
        "cpu" if environment.get("lane") == "cpu-interpreter" else "gpu": environment.get("device_name"),
        "capability": environment.get("capability"),
        "mig": environment.get("mig"),
        "driver": _release(environment.get("driver"), 1),
        "torch": _release(environment.get("torch"), 2),
        "triton": _release(environment.get("triton"), 2),
    }
    return {name: str(value) for name, value in parts.items() if value}


def elsewhere(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """The differences of two places of latency, as half a sentence; ``None`` if there are none."""
    other = [
        f"{words} {before.get(name) or 'unknown'} there, {now.get(name) or 'unknown'} here"
        for name, words in _LATENCY.items()
        if before.get(name) != now.get(name)
    ]
    return "; ".join(other) or None


def unit_of(uuid: str | None) -> str:
    """Eight digits that identify a GPU without its real id; empty if that is not known."""
    return hashlib.sha256(uuid.encode()).hexdigest()[:8] if uuid else ""


def renewed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Versions that may explain another fact: ``"; made with triton 3.6.0, this is 3.7.1"``, else nothing."""
    parts = [
        f"{name} {before[name]}, this is {now[name]}"
        for name in ("torch", "triton", "cuda", "driver")
        if before.get(name) and now.get(name) and before[name] != now[name]
    ]
    return f"; the baseline was made with {', '.join(parts)}" if parts else ""


def _release(version: Any, parts: int) -> str:
    return ".".join(str(version).partition("+")[0].split(".")[:parts]) if version else ""


# Stored sessions of a row: enough for a spread between sessions, few enough to read.
MOST_SESSIONS = 20
_NUMBERS = ("fused_s", "reference_s", "ratio", "low", "high", "error")
# The keys of a row in a file, in this order.
CONTENT = ("case", "role", "facts", "names", "methods", "reasons", "latency", "golden", "made")
# Types of a row's fields; the other fields are objects.
_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("test", "case", "role", "device", "made"), (str,)),
    "latency": (Mapping, type(None)),
    **dict.fromkeys(("golden", "timeline"), (Sequence,)),
}
# The repr of an object in a parameter's id has another address in each process.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class Key(NamedTuple):
    """The identity of a measured thing on one device class."""

    test: str
    case: str
    role: str

    def __str__(self) -> str:
        return f"{self.test} [{self.case}] {self.role}"


@dataclass(frozen=True, slots=True)
class Session:
    """One earlier session's log ratio of fused to reference; ``unit`` identifies one GPU of a model."""

    ratio: float
    unit: str = ""
    made: str = ""


@dataclass(frozen=True, slots=True)
class Latency:
    """Time of the fused call, always beside that of the reference.

    ``fused_s`` and ``reference_s`` are medians in seconds, for people and ``latency_judge.worth``. ``ratio`` is the
    median over blocks of log(fused / reference), ``low`` to ``high`` its interval, ``error`` its standard error;
    ``blocks`` are the raw medians of the blocks. ``method`` says how it was timed (``timer``, ``cache``, ``captured``,
    ...). ``control`` is a digest of the reference: ratios to two references do not compare. ``aa`` is the log ratio of
    two runs of one thing. Latencies compare within a ``place`` (see ``latency_place``); ``unit`` is this GPU.
    ``history``: the newest is last.
    """

    fused_s: float
    reference_s: float
    ratio: float
    low: float
    high: float
    error: float
    blocks: tuple[float, ...]
    method: Mapping[str, str] = field(default_factory=dict)
    control: str = ""
    aa: float | None = None
    place: Mapping[str, str] = field(default_factory=dict)
    unit: str = ""
    history: tuple[Session, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Latency:
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` where the data are not a latency."""
        known = {field.name: data[field.name] for field in fields(cls)}
        known |= {name: float(known[name]) for name in _NUMBERS}
        known |= {name: dict(known[name]) for name in ("method", "place")}
        sessions = [(float(one["ratio"]), str(one["unit"]), str(one["made"])) for one in known["history"]]
        known |= {"blocks": tuple(map(float, known["blocks"])), "history": tuple(Session(*one) for one in sessions)}
        return cls(**known)


@dataclass(frozen=True, slots=True)
class GoldenOutput:
    """One output of one pinned case. ``digest`` is of all bytes in logical order. ``values`` are elements spread over
    the output, at positions that only its size decides, complex numbers as two; ``allowed`` is how far each may move
    between two right versions, in the output's units, empty if unknown. ``magnitude`` is the mean absolute value of the
    finite elements, ``slack`` how far it may move. ``nonfinite`` counts NaN and infinities."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    values: tuple[float, ...] = ()
    allowed: tuple[float, ...] = ()
    magnitude: float = 0.0
    slack: float | None = None
    nonfinite: int = 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GoldenOutput:
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` where the data are not an output."""
        known = {field.name: data[field.name] for field in fields(cls)}
        known |= {name: tuple(map(float, known[name])) for name in ("values", "allowed")}
        slack = known["slack"]
        known |= {"magnitude": float(known["magnitude"]), "slack": None if slack is None else float(slack)}
        return cls(**known | {"shape": tuple(known["shape"])})


@dataclass(frozen=True, slots=True)
class Row:
    """One measured thing of a test.

    ``test`` is a node id (see :func:`stable`), ``case`` the sizes and the dtype as text, ``role`` is ``"fused"``,
    ``"fused backward"``, ``"reference"`` or ``"compiled"``, ``device`` a device class. ``facts`` are exact integers
    under stable names (see ``facts``), ``names`` counts launches by kernel, ``methods`` says how facts of a prefix were
    counted (``{"launches": "graph"}``): counts of two methods do not compare. ``reasons`` counts why kernels were
    compiled again over several cases. ``environment`` has versions as text, ``made`` the time (UTC,
    ``"2026-11-22T04:00:00Z"``).

    ``measures`` are for reports only, not for verdicts or baseline files. Their names end in units: ``host_s`` (host
    seconds a call), ``span_s`` and ``busy_s`` (from the first activity's start to the last one's end, and the part with
    an activity), ``copy_bytes_per_s`` and ``matmul_flops_per_s`` (ceilings of this device, from the same run).
    ``timeline`` is one call. ``samples`` are the seconds a call behind ``latency``, by role; not in files either.

    Raises ``TypeError`` for a fact or count that is not exactly an ``int``: a number of numpy would end a run of
    pytest-xdist, and a float cannot be compared exactly.
    """

    test: str
    case: str
    role: str
    device: str
    facts: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, int] = field(default_factory=dict)
    methods: Mapping[str, str] = field(default_factory=dict)
    latency: Latency | None = None
    golden: tuple[GoldenOutput, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    made: str = ""
    measures: Mapping[str, float] = field(default_factory=dict)
    timeline: tuple[Activity, ...] = ()
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    reasons: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, counts in (("fact", self.facts), ("count of the kernel", self.names), ("reason", self.reasons)):
            for name, value in counts.items():
                if type(value) is not int:
                    raise TypeError(f"the {what} {name!r} is {value!r} ({type(value).__name__}); an int is needed")

    @property
    def key(self) -> Key:
        return Key(self.test, self.case, self.role)

    @property
    def judged(self) -> bool:
        """Whether the row is about the fused kernel; the others are what it is compared with."""
        return self.role.partition(" ")[0] == "fused"

    def as_json(self) -> dict[str, Any]:
        """The row without empty values, for a report."""
        return {name: value for name, value in _plain(self).items() if value or name == "environment"}

    def content(self) -> dict[str, Any]:
        """The row as a file has it: without ``test``, ``device``, ``environment`` and empty values."""
        data = _plain(self)
        return {name: data[name] for name in CONTENT if data[name]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """A row without unknown keys. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for other data."""
        known = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        for name, value in known.items():
            kinds = _KINDS.get(name, (Mapping,))
            if not isinstance(value, kinds):
                raise TypeError(f"{name!r} is {value!r}, which is no {kinds[0].__name__}")
        if known.get("latency") is not None:
            known["latency"] = Latency.from_json(known["latency"])
        known["golden"] = tuple(map(GoldenOutput.from_json, known.get("golden", ())))
        known["timeline"] = tuple(Activity(*one) for one in known.get("timeline", ()))
        known["samples"] = {role: tuple(map(float, seconds)) for role, seconds in known.get("samples", {}).items()}
        return cls(**known)


def _plain(value: Any) -> Any:
    """A record in exact JSON types: a number of numpy ends a run of pytest-xdist. NaN and infinity are text."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in sorted(value.items())}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not isinstance(value, float):
        return value
    return float(value) if math.isfinite(value) else str(value)


def stable(nodeid: str) -> str:
    """A node id without the addresses of objects in its parameters' ids."""
    return _ADDRESS.sub("", nodeid)
