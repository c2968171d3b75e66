"""`Log`: one JSON line per event, appended by one process and readable even if the process is killed."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]
# Events that wait for the writer; beyond these the oldest are dropped and counted.
_WAITING = 4096
# A line is written with one call, so that a reader or a second writer never sees parts of lines mixed.
_LONGEST = 1 << 16


@dataclass(eq=False)
class Log:
    """The events of one canary in one process. ``add`` touches no file; ``add`` and ``flush`` raise nothing.
    Without a ``folder`` events reach only the ``publishers``. A file of more than half of ``most_bytes`` replaces
    ``*.1.jsonl``, or is shortened by ``shorten``. ``publish_errors`` and ``lost`` are counts."""

    name: str
    folder: Path | None
    most_bytes: int
    publishers: Sequence[Callable[[Mapping[str, Any]], object]] = ()
    suffix: str = ".jsonl"
    mode: int = 0o644
    shorten: Callable[[Path], object] | None = None

    def __post_init__(self) -> None:
        self.clock = time.time
        self.begin()

    def begin(self) -> None:
        """Starts an empty log with a free lock; a forked child calls it again."""
        self._lock = threading.Lock()
        # Held until the events are in the file, which keeps their order. Reentrant: a publisher may flush.
        self._writing = threading.RLock()
        self._waiting: deque[Event] = deque()
        self._added = 0
        self.lost = 0
        self.publish_errors = 0
        self.path: Path | None = None
        host = re.sub(r"[^A-Za-z0-9_]+", "-", socket.gethostname())[:40]
        # Unique, so that evidence copied to two places is not counted as new.
        self.process = f"{host}.{os.getpid()}.{time.time_ns()}"
        if self.folder is not None:
            slug = re.sub(r"[^A-Za-z0-9_]+", "-", self.name)[:60]
            self.path = self.folder / f"{slug}.{self.process}{self.suffix}"

    def add(self, kind: str, **facts: Any) -> None:
        with self._lock:
            self._added += 1
            who = {"pid": os.getpid(), "process": self.process, "name": self.name}
            self._waiting.append({"time": self.clock(), "n": self._added, **who, "event": kind, **facts})
            if len(self._waiting) > _WAITING:
                self._waiting.popleft()
                self.lost += 1

    def flush(self) -> None:
        """Writes the waiting events, in order, and passes them to the publishers. Counts lost events."""
        with self._writing:
            with self._lock:
                events = list(self._waiting)
                self._waiting.clear()
            if not events:
                return
            if self.path is not None:
                try:
                    self._write(self.path, [_line(event) for event in events])
                except OSError:
                    self.lost += len(events)
            for publisher in self.publishers:
                for event in events:
                    try:
                        publisher(event)
                    except Exception:  # noqa: BLE001 - a publisher's error must not fail the caller
                        self.publish_errors += 1

    def _write(self, path: Path, lines: Iterable[bytes]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = self._open(path)
        try:
            size = os.fstat(handle).st_size
            for line in lines:
                if size and size + len(line) > self.most_bytes // 2:
                    os.close(handle)
                    handle = -1
                    if self.shorten is None:
                        path.replace(path.with_suffix(".1.jsonl"))
                    else:
                        self.shorten(path)
                    handle = self._open(path)
                    size = os.fstat(handle).st_size
                    if size + len(line) > self.most_bytes:
                        self.lost += 1
                        continue
                written = os.write(handle, line)
                size += written
                if written < len(line):
                    # The disk is full and took a part: end it, so that the next line stays separate.
                    os.write(handle, b"\n")
                    self.lost += 1
        finally:
            if handle >= 0:
                os.close(handle)

    def _open(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, self.mode)


def _line(event: Event) -> bytes:
    line = json.dumps(event, default=str, separators=(",", ":")).encode() + b"\n"
    if len(line) > _LONGEST:
        short = {key: value if not isinstance(value, str) else value[:200] for key, value in event.items()}
        line = json.dumps(short, default=str, separators=(",", ":")).encode()[: _LONGEST - 1] + b"\n"
    return line


def read(path: Path) -> Iterator[Event]:
    """The events of a file, in order, without lines cut short by a kill or a full disk. Raises ``OSError``."""
    with path.open("rb") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and line.endswith(b"\n"):
                yield event


def location(kernel: Callable[..., Any]) -> str:
    """The place where a kernel is defined: ``"package.module:function"``."""
    name = getattr(kernel, "__qualname__", type(kernel).__qualname__)
    return f"{getattr(kernel, '__module__', '?')}:{name}"
