"""`Cases`: the recorded calls of all processes as cases of a spec, weighted by the calls that each represents."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_fusion.canary.recording import recorded_file
from pytest_fusion.canary.recording.matching import UnmatchedError, match
from pytest_fusion.canary.recording.recorded_file import SUFFIX, RecordedFile
from pytest_fusion.case.case_model import Case
from pytest_fusion.diagnosis.repro import replay_file as replays
from pytest_fusion.errors import CanaryError
from pytest_fusion.run.process.atomic_file import replace_whole
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import did_you_mean, grouped

PathLike = str | os.PathLike[str]
Paths = PathLike | Iterable[PathLike]
# Different reasons in a summary; others are counted together.
_MOST_REASONS = 50
_OTHERS = "others"
# A recording has up to 64 calls of each of up to 256 classes of shapes, and all checks judge each case for two kernels.
# Cases of one class differ in strides and values, which the generated cases vary too.
MOST, FEWEST_OF_A_CLASS = 64, 4


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded call: its line, its file, and the number of calls of its bucket that it represents."""

    event: Mapping[str, Any]
    path: Path
    bucket: str
    weight: float


@dataclass(slots=True)
class Calls:
    """The recorded calls of one function. ``total`` counts all calls, ``uncovered`` those of unsampled buckets."""

    name: str
    sampled: list[Call] = field(default_factory=list)
    total: int = 0
    uncovered: dict[str, int] = field(default_factory=dict)
    expired: int = 0
    files: int = 0


@dataclass(frozen=True, slots=True)
class RecordedCase:
    """A case that represents ``weight`` calls; ``notes`` say what differs from the recording."""

    case: Case
    weight: float
    bucket: str
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Cases:
    """The cases of a spec in recorded traffic; iterates over (case, calls that it represents). The weights, the
    ``unmatched`` calls (no cases of the spec, by reason) and ``uncovered`` ones add up to ``total``."""

    name: str
    found: list[RecordedCase]
    total: int
    unmatched: dict[str, float]
    uncovered: dict[str, int]
    expired: int = 0
    files: int = 0

    def __iter__(self) -> Iterator[tuple[Case, float]]:
        return ((one.case, one.weight) for one in self.found)

    def __len__(self) -> int:
        return len(self.found)

    @property
    def covered(self) -> float:
        """The share of all calls that the cases represent, 0 to 1."""
        return sum(one.weight for one in self.found) / self.total if self.total else 0.0

    def lines(self) -> list[str]:
        """A summary for people: calls, cases, calls without a case, and notes."""
        found = [
            f"{self.name}: {self.total} calls in {self.files} files; {len(self)} cases stand for {self.covered:.1%}"
        ]
        unmatched = sorted(self.unmatched.items(), key=lambda one: -one[1])
        found += [f"no case for {weight:.0f} calls: {why}" for why, weight in unmatched]
        found += [
            f"no case for {calls} calls of {bucket}: none of them is in the sample"
            for bucket, calls in self.uncovered.items()
        ]
        if self.expired:
            found.append(f"{self.expired} recorded calls were too old")
        notes = Counter(note for one in self.found for note in dict.fromkeys(one.notes))
        return found + [f"in {count} cases {note}" for note, count in notes.most_common(_MOST_REASONS)]


def read(paths: Paths, name: str | None = None, *, default: str = "", now: float | None = None) -> Calls:
    """The calls of ``name``, by default of ``default`` or of the only function, in recordings: files or folders.
    Raises ``CanaryError``."""
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files = [_load(path, time.time() if now is None else now) for path in _files(given)]
    names = sorted({file.name for file in files if file.name})
    if name is None and default in names:
        name = default
    if name is None and len(names) > 1:
        raise CanaryError(f"there are recordings of {', '.join(names)}; choose one, as in name={names[0]!r}")
    if not names or (name is not None and name not in names):
        listed = f"{name!r} was not recorded{did_you_mean(name, names)}" if name and names else "nothing was recorded"
        raise CanaryError(
            f"{listed} in {', '.join(map(str, given))}; record with canary.record(name, function, folder)"
        )
    return _merged(name or names[0], [file for file in files if file.name == (name or names[0])])


def cases(
    paths: Paths,
    spec: FusionSpec,
    *,
    name: str | None = None,
    rename: Mapping[str, str | None] | None = None,
    per_bucket: int | None = None,
) -> Cases:
    """The cases of ``spec`` in the recording ``name``, by default the spec's or the only one. Raises ``CanaryError``.
    ``rename`` maps recorded parameters to inputs, or to ``None`` to ignore them (``self``). ``per_bucket`` bounds the
    cases of a class of shapes, which then also represent the calls left out."""
    calls = read(paths, name, default=spec.name)
    found: list[RecordedCase] = []
    unmatched: dict[str, float] = {}
    for call in _at_most(calls.sampled, per_bucket):
        try:
            matched = match(spec, call.event, recorded_file.tensors_of(call.path), rename)
        except UnmatchedError as error:
            why = str(error) if str(error) in unmatched or len(unmatched) < _MOST_REASONS else _OTHERS
            unmatched[why] = unmatched.get(why, 0.0) + call.weight
            continue
        found.append(RecordedCase(matched.case, call.weight, call.bucket, tuple(matched.notes)))
    return Cases(calls.name, found, calls.total, unmatched, calls.uncovered, calls.expired, calls.files)


def recorded(path: Path, spec: FusionSpec) -> Cases:
    """At most `MOST` cases of a recording, or a few of each class if that is more. Raises ``CanaryError``."""
    try:
        found = cases(path, spec)
        if len(found) <= MOST:
            return found
        classes = len({one.bucket for one in found.found})
        return cases(path, spec, per_bucket=max(FEWEST_OF_A_CLASS, MOST // classes))
    except CanaryError as error:
        raise CanaryError(f"--recording {path}: {error}") from None


def pin(recorded: Cases, spec: FusionSpec, folder: PathLike, *, most: int = 16) -> list[Path]:
    """Writes the cases that represent most calls to a ``folder`` of pinned replays, beside the spec's test or above it.
    Raises ``CanaryError`` if its name is not ``fusion_replays``, and ``OSError``."""
    target = Path(folder)
    if target.name != "fusion_replays":
        raise CanaryError(f"pin to a folder named fusion_replays, where pytest looks for pinned replays, not {target}")
    target.mkdir(parents=True, exist_ok=True)
    heaviest = sorted(recorded.found, key=lambda one: -one.weight)[:most]
    return [write_replay(one.case, spec, target, check=replays.RECORDED) for one in heaviest]


def write_replay(
    case: Case,
    spec: FusionSpec,
    folder: Path,
    *,
    check: str,
    mode: int = 0o666,
    made: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a replay file for the test whose spec has this name. Raises ``OSError``."""
    replay = replays.Replay(spec.name, spec.name, check, None, case, made or {})
    path = folder / replays.file_name(replay)
    replace_whole(path, replays.text(replay), mode)
    return path


def _files(given: Iterable[PathLike]) -> list[Path]:
    found: dict[Path, None] = {}
    for path in map(Path, given):
        found.update(dict.fromkeys(sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]))
    return list(found)


def _load(path: Path, now: float) -> RecordedFile:
    try:
        file = recorded_file.load(path, now)
    except OSError as error:
        raise CanaryError(f"cannot read the recording {path}: {error.strerror}") from None
    if file.schema > recorded_file.SCHEMA:
        raise CanaryError(
            f"the recording {path} has schema {file.schema}, this version reads {recorded_file.SCHEMA}; "
            "read it with the version that wrote it"
        )
    return file


def _merged(name: str, files: list[RecordedFile]) -> Calls:
    found = Calls(name, files=len(files), expired=sum(file.expired for file in files))
    totals: Counter[str] = Counter()
    by_bucket: dict[str, list[Call]] = {}
    for file in files:
        for bucket, count in file.per_bucket.items():
            totals[bucket] += count
            own = [event for (where, _), event in sorted(file.calls.items()) if where == bucket]
            by_bucket.setdefault(bucket, []).extend(Call(event, file.path, bucket, count / len(own)) for event in own)
        for event in file.finds:
            bucket = str(event.get("bucket"))
            totals[bucket] += 1
            by_bucket.setdefault(bucket, []).append(Call(event, file.path, bucket, 1.0))
    found.total = totals.total()
    for bucket, count in sorted(totals.items()):
        # Calls of a process without a sampled call of this bucket count with those of the others.
        calls = _weighted(by_bucket[bucket], count)
        found.sampled += calls
        if count and not calls:
            found.uncovered[bucket] = count
    return found


def _weighted(calls: list[Call], total: float) -> list[Call]:
    """The calls with proportional weights that add up to ``total``; none if all weights are 0."""
    known = sum(call.weight for call in calls)
    return [replace(call, weight=call.weight * total / known) for call in calls] if known else []


def _at_most(calls: list[Call], most: int | None) -> list[Call]:
    """At most so many calls of each bucket, chosen by seed, that represent all calls of it."""
    if most is None:
        return calls
    chosen: list[Call] = []
    for all_of in grouped((call.bucket, call) for call in calls).values():
        few = sorted(all_of, key=lambda call: (int(call.event.get("seed") or 0), str(call.path)))[: max(most, 1)]
        chosen += _weighted(few, sum(call.weight for call in all_of))
    return chosen
