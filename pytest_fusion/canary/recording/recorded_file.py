"""The file of one recording process, where the latest line of each place counts, and the tensors that belong to it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from pytest_fusion.canary.evidence.events import Event, read
from pytest_fusion.case.recorded_values import digest
from pytest_fusion.errors import CanaryError
from pytest_fusion.run.process.atomic_file import replace_whole

PRIVATE = 0o600


def need_safetensors(who: str) -> None:
    """Raises ``CanaryError`` if safetensors, which writing tensors needs, is not installed."""
    if importlib.util.find_spec("safetensors") is None:
        raise CanaryError(f"{who}: writing tensors needs safetensors; pip install 'pytest-fusion[record]'")


class TensorFiles:
    """A folder of tensor files of one process, with at most ``most_bytes`` in all."""

    def __init__(self, folder: Path, most_bytes: float) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        self._sizes: dict[str, int] = {}

    def keep(self, tensors: Mapping[str, Tensor]) -> str | None:
        """The name of a file with these tensors, new or not; ``None`` if there is no room. Raises ``OSError``."""
        from safetensors.torch import save

        data = save(dict(tensors))
        name = f"{digest(data)}.safetensors"
        if name in self._sizes:
            return name
        if sum(self._sizes.values()) + len(data) > self._most_bytes:
            return None
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_whole(self.folder / name, data, PRIVATE)
        self._sizes[name] = len(data)
        return name

    def forget_all_but(self, names: Collection[str]) -> None:
        """Deletes the files that are not among ``names``. Raises nothing."""
        for name in [name for name in self._sizes if name not in names]:
            with contextlib.suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)
                del self._sizes[name]


SUFFIX = ".recording.jsonl"
SCHEMA = 1


@dataclass(slots=True)
class RecordedFile:
    """A file's sampled calls by bucket and place, calls per bucket, and ``finds``: disagreements, each one call."""

    path: Path
    name: str = ""
    schema: int = SCHEMA
    head: Event | None = None
    counts: Event | None = None
    calls: dict[tuple[str, int], Event] = field(default_factory=dict)
    finds: list[Event] = field(default_factory=list)
    expired: int = 0

    @property
    def per_bucket(self) -> dict[str, int]:
        """Calls by bucket, at least as many as the number of the last sampled call shows."""
        found: dict[str, int] = {}
        for (bucket, _), event in self.calls.items():
            found[bucket] = max(found.get(bucket, 0), int(event["call"]) + 1)
        for bucket, calls in ((self.counts or {}).get("calls") or {}).items():
            found[str(bucket)] = max(found.get(str(bucket), 0), int(calls))
        return found


def tensors_of(path: Path) -> Path:
    """The folder of the tensor files that belong to a recording."""
    return path.with_name(path.name.removesuffix(".jsonl") + ".tensors")


def load(path: Path, now: float, keep_s: float | None = None) -> RecordedFile:
    """A file without broken and foreign lines and without calls that are too old. Raises ``OSError``."""
    found = RecordedFile(path)
    for event in read(path):
        kind = event.get("event")
        if kind == "recording":
            found.head, found.schema = event, int(event.get("schema") or 0)
            found.name = str(event.get("name"))
        elif kind == "calls" and isinstance(event.get("calls"), dict):
            found.counts = event
        elif kind == "call" and isinstance(event.get("arguments"), dict):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                found.calls[str(event["bucket"]), int(event["place"])] = event
        elif kind == "find" and isinstance(event.get("arguments"), dict):
            found.finds.append(event)
        found.name = found.name or str(event.get("name") or "")
    given = (found.head or {}).get("keep_s")
    oldest = now - (keep_s if keep_s is not None else given if isinstance(given, int | float) else float("inf"))
    old = [place for place, event in found.calls.items() if float(event.get("time") or 0.0) < oldest]
    for place in old:
        del found.calls[place]
    finds = [event for event in found.finds if float(event.get("time") or 0.0) >= oldest]
    found.expired = len(old) + len(found.finds) - len(finds)
    found.finds = finds
    return found


def shorten(path: Path, now: float, keep_s: float) -> RecordedFile:
    """Rewrites a file atomically with the events that count, and no call older than ``keep_s``. Raises ``OSError``."""
    found = load(path, now, keep_s)
    heads = [event for event in (found.head, found.counts) if event is not None]
    events = (*heads, *found.calls.values(), *found.finds)
    lines = [json.dumps(event, separators=(",", ":"), default=str).encode() + b"\n" for event in events]
    replace_whole(path, b"".join(lines), PRIVATE)
    return found


def forget_old(folder: Path, slug: str, now: float, keep_s: float) -> None:
    """Deletes files of this name that were not written to for ``keep_s``, with their tensors. Raises nothing."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{slug}.*{SUFFIX}"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < now - keep_s:
                    path.unlink(missing_ok=True)
                    shutil.rmtree(tensors_of(path), ignore_errors=True)


def named_tensors(event: Mapping[str, Any]) -> str | None:
    """The name of the tensor file of a call, in the folder beside its recording; ``None`` if it has none."""
    name = event.get("tensors")
    return name if isinstance(name, str) and "/" not in name and name.endswith(".safetensors") else None
