"""`record`: wraps a function and writes a random sample of its calls in a serving process to a file."""

from __future__ import annotations

import functools
import math
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pytest_fusion.canary.evidence.events import Log
from pytest_fusion.canary.live import background
from pytest_fusion.canary.live.calls.arguments import bucket_of, shapes_of
from pytest_fusion.canary.live.calls.captures import recorded as captured
from pytest_fusion.canary.recording import recorded_file
from pytest_fusion.canary.recording.call_json import Binding, DescribedCall
from pytest_fusion.canary.recording.recorded_file import PRIVATE, TensorFiles, need_safetensors
from pytest_fusion.case import counter_random
from pytest_fusion.errors import CanaryError
from pytest_fusion.spec.wording import brief, checks_words

# Classes that are counted separately; further ones are counted together.
MOST_BUCKETS = 256
OTHERS = "others"


class Bucket:
    """The call counter and sampler of one class of shapes."""

    __slots__ = ("_drawn", "_largest", "_lock", "_most", "_next", "_seed", "calls", "name")

    def __init__(self, name: str, seed: int, most: int) -> None:
        self.name = name
        self.calls = 0
        self._seed = seed
        self._most = most
        # If each call had a uniform number: the largest of the ``most`` smallest.
        self._largest = 1.0
        self._drawn = self._next = 0
        # A signal handler may call what it interrupted.
        self._lock = threading.RLock()

    def admit(self) -> tuple[int, int | None]:
        """Counts a call; returns its number, from 0, and its place in the sample, if any, equally probable for all
        calls. Skips are drawn at once: one comparison a call (Li's algorithm L, ACM TOMS 20, 1994)."""
        with self._lock:
            number = self.calls
            self.calls = number + 1
            if number < self._next:
                return number, None
            place = number if number < self._most else int(self._uniform() * self._most)
            self._next = number + 1
            if self._next >= self._most:
                self._largest *= self._uniform() ** (1 / self._most)
                self._next += int(math.log(self._uniform()) / math.log1p(-self._largest))
            return number, place

    def _uniform(self) -> float:
        """A random number above 0 and below 1."""
        self._drawn += 1
        return ((counter_random.element(self._seed, self._drawn) >> 12) + 0.5) * 2.0**-52


ENVIRONMENT = "PYTEST_FUSION_RECORD"
# Calls of each bucket in the sample.
PER_BUCKET = 64
_DAY_S = 86400.0
# Shapes whose bucket is cached.
_MOST_SHAPES = 4096
# Calls that wait for their device or for the writing thread.
_MOST_WAITING = 512
# Seconds that an ending process waits for the device.
_LAST_S = 1.0
_CHECK_AGE_S = 3600.0


@checks_words(CanaryError)
def record(
    name: str,
    fn: Callable[..., Any],
    path: str | os.PathLike[str],
    *,
    tensors: bool = False,
    keep_days: float = 30.0,
    call_mib: float = 64.0,
    tensors_mib: float = 256.0,
    file_mib: float = 64.0,
    interval_s: float = 5.0,
    publishers: Sequence[Callable[[Mapping[str, Any]], object]] = (),
) -> Recorder:
    """A callable that replaces ``fn`` and writes a sample of its calls to a file in the folder ``path``.

    All calls are counted by the class of their shapes. At most 64 of each class, with equal probability, are written:
    shapes, strides, alignment, dtypes, devices, plain arguments, a summary of each tensor; with ``tensors=True`` the
    tensors too, of calls up to ``call_mib``, in all ``tensors_mib``. Files are private to their user; calls older than
    ``keep_days`` are deleted. ``publishers`` get each line, in the background. ``PYTEST_FUSION_RECORD=off`` switches
    recording off. Raises ``CanaryError``; errors while recording never fail a call.
    """
    if not isinstance(name, str) or not name.strip() or any(sign in name for sign in ":#*\n"):
        raise CanaryError(f"canary.record({name!r}): expected a name without ':', '#', '*' or line ends, as 'rms_norm'")
    if not callable(fn):
        raise CanaryError(f"canary.record({name!r}, {fn!r}): expected a function called like the kernel")
    given = {"keep_days": keep_days, "call_mib": call_mib, "tensors_mib": tensors_mib, "file_mib": file_mib}
    for option, value in {**given, "interval_s": interval_s}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise CanaryError(f"canary.record({name!r}, {option}={value!r}): expected a finite number above 0")
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise CanaryError(
            f"canary.record({name!r}): {folder} is a file; give a folder, in which each process writes its own file"
        )
    if tensors:
        need_safetensors(f"canary.record({name!r}, tensors=True)")
    made = Recorder(
        name,
        fn,
        folder,
        call_bytes=call_mib * 2**20 if tensors else 0.0,
        tensor_bytes=tensors_mib * 2**20,
        file_bytes=int(file_mib * 2**20),
        keep_s=keep_days * _DAY_S,
        interval_s=interval_s,
        publishers=publishers,
    )
    background.add(made)
    return made


@dataclass(slots=True)
class _Seen:
    bucket: Bucket
    number: int
    place: int
    found: DescribedCall


class Recorder:
    """What :func:`record` makes. Every method may be called from any thread."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        folder: Path,
        *,
        call_bytes: float,
        tensor_bytes: float,
        file_bytes: int,
        keep_s: float,
        interval_s: float,
        publishers: Sequence[Callable[[Mapping[str, Any]], object]],
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self.name = name
        self.interval_s = interval_s
        self._function = function
        self._binding = Binding(function)
        self._call_bytes, self._tensor_bytes = call_bytes, tensor_bytes
        self._keep_s = keep_s
        self._clock = time.time
        self._on = os.environ.get(ENVIRONMENT, "").strip().lower() not in ("off", "0", "no", "false")
        self._log = Log(
            name,
            folder,
            file_bytes,
            publishers,
            suffix=recorded_file.SUFFIX,
            mode=PRIVATE,
            shorten=lambda path: recorded_file.shorten(path, self._clock(), self._keep_s),
        )
        self._begin()

    def _begin(self) -> None:
        self._seed = counter_random.mix("recording", socket.gethostname(), os.getpid(), time.time_ns())
        self._buckets: dict[str, Bucket] = {}
        self._shapes: dict[object, Bucket] = {}
        self._waiting: deque[_Seen] = deque()
        self._counts: Counter[str] = Counter()
        self._lock = threading.RLock()
        # A publisher may flush.
        self._tending = threading.RLock()
        self._written: dict[str, int] = {}
        self._files: dict[tuple[str, int], str] = {}
        self._tensors: TensorFiles | None = None
        if self._call_bytes and self._log.path is not None:
            self._tensors = TensorFiles(recorded_file.tensors_of(self._log.path), self._tensor_bytes)
        self._checked_age = 0.0
        self._oldest = self._clock()
        self._headed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._on and not captured():
            try:
                self._see(args, kwargs)
            except Exception as error:  # noqa: BLE001 - an error while recording must not fail the call
                self._skip(brief(error))
        return self._function(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Binds like a function, so that a recorder can replace a method."""
        return self if instance is None else functools.partial(self, instance)

    @property
    def path(self) -> Path:
        """The file of this process, created when the first lines are written."""
        assert self._log.path is not None
        return self._log.path

    def status(self) -> dict[str, Any]:
        """Counts so far, in JSON types: calls by bucket, skipped calls by reason, lines that were not written."""
        with self._lock:
            skipped = dict(sorted(self._counts.items()))
        return {
            "name": self.name,
            "recording": self._on,
            "calls": self._calls(),
            "skipped": skipped,
            "waiting": len(self._waiting),
            "file": str(self._log.path),
            "lost_lines": self._log.lost,
            "publish_errors": self._log.publish_errors,
        }

    def flush(self) -> None:
        """Writes calls whose numbers are on the host; a thread does this every ``interval_s``. Raises nothing."""
        with self._tending:
            calls = self._calls()
            if calls and not self._headed:
                self._headed = True
                facts = {"schema": recorded_file.SCHEMA, "keep_s": self._keep_s, "tensors": bool(self._call_bytes)}
                self._log.add("recording", **facts)
            changed = False
            while self._waiting and self._waiting[0].found.ready:
                self._write(self._waiting.popleft())
                changed = True
            if calls != self._written:
                self._written = calls
                with self._lock:
                    skipped = dict(self._counts)
                self._log.add("calls", calls=calls, skipped=skipped)
            lost = self._log.lost
            self._log.flush()
            if self._log.lost > lost:
                # The disk was full and lines were lost: write the head and the counts again.
                self._headed, self._written = False, {}
            elif changed and self._tensors is not None:
                self._tensors.forget_all_but(set(self._files.values()))
            self._mind_age()

    tend = flush

    def at_exit(self) -> None:
        """Waits a moment for the devices, then writes."""
        until = time.monotonic() + _LAST_S
        while self._waiting and not all(seen.found.ready for seen in list(self._waiting)) and time.monotonic() < until:
            time.sleep(0.01)
        self.flush()

    def after_fork(self) -> None:
        """Gives a forked child its own counts and file."""
        self._log.begin()
        self._begin()

    def close(self) -> None:
        """Writes what is pending and stops recording; calls go to the function alone."""
        self._on = False
        background.remove(self)
        self.at_exit()

    def _see(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes = shapes_of(args, kwargs)
        bucket = self._shapes.get(shapes)
        if bucket is None:
            bucket = self._bucket(bucket_of(args, kwargs))
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            self._shapes[shapes] = bucket
        number, place = bucket.admit()
        if place is None:
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._skip("too many wait to be written")
            return
        # Waiting tensors are bounded like written ones.
        room = self._tensor_bytes - sum(seen.found.held_bytes for seen in list(self._waiting))
        found = DescribedCall(self._binding(args, kwargs), keep_bytes=min(self._call_bytes, max(room, 1.0)))
        self._waiting.append(_Seen(bucket, number, place, found))

    def _bucket(self, name: str) -> Bucket:
        """The bucket of this name, or ``OTHERS`` where there are too many."""
        with self._lock:
            if name not in self._buckets and len(self._buckets) >= MOST_BUCKETS:
                name = OTHERS
            if name not in self._buckets:
                self._buckets[name] = Bucket(name, counter_random.mix(self._seed, name), PER_BUCKET)
            return self._buckets[name]

    def _calls(self) -> dict[str, int]:
        with self._lock:
            return {name: bucket.calls for name, bucket in self._buckets.items()}

    def _skip(self, reason: str) -> None:
        with self._lock:
            reason = reason[:80]
            self._counts[reason if reason in self._counts or len(self._counts) < 50 else "others"] += 1

    def _write(self, seen: _Seen) -> None:
        try:
            bucket, found = seen.bucket.name, seen.found
            facts: dict[str, Any] = {"bucket": bucket, "call": seen.number, "place": seen.place}
            facts["seed"] = counter_random.mix("recorded", bucket, seen.number) >> 33
            if self._tensors is not None:
                self._keep(self._tensors, found, facts)
            self._log.add("call", **facts, arguments=found.arguments())
        except Exception as error:  # noqa: BLE001 - a call that cannot be written is skipped and counted
            self._skip(brief(error))

    def _keep(self, files: TensorFiles, found: DescribedCall, facts: dict[str, Any]) -> None:
        place = facts["bucket"], facts["place"]
        self._files.pop(place, None)
        held: dict[str, Tensor] = found.tensors
        if found.too_large:
            self._skip("tensors not kept: larger than call_mib, or too many wait to be written")
        if not held:
            return
        try:
            name = files.keep(held)
        except Exception as error:  # noqa: BLE001 - a full disk, a dtype that safetensors lacks: the summary is written
            self._skip(f"tensors not kept: {brief(error)}")
            return
        if name is None:
            self._skip("tensors not kept: more than tensors_mib")
            return
        facts["tensors"] = self._files[place] = name

    def _mind_age(self) -> None:
        """Deletes old calls, here and in files of ended processes."""
        now = self._clock()
        if now - self._checked_age < min(_CHECK_AGE_S, self._keep_s / 4):
            return
        self._checked_age = now
        path = self.path
        try:
            recorded_file.forget_old(path.parent, path.name.partition(".")[0], now, self._keep_s)
            if now - self._oldest > self._keep_s and path.exists():
                left = recorded_file.shorten(path, now, self._keep_s)
                self._oldest = min((float(event["time"]) for event in left.calls.values()), default=now)
                self._files = {place: file for place, file in self._files.items() if place in left.calls}
                if self._tensors is not None:
                    self._tensors.forget_all_but(set(self._files.values()))
        except OSError as error:
            self._skip(f"not shortened: {brief(error)}")
