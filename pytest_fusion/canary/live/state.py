"""`Control`: a canary's mode, from its policy and from the environment, a file, a call, or a trip."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path

from pytest_fusion.canary.live.policy import OFF, Mode, Policy
from pytest_fusion.errors import CanaryError
from pytest_fusion.spec.wording import brief

# A file of states is a few lines; a longer file is another one.
_LONGEST = 1 << 20
_PATIENCE_S = 1.0


class PatientFile:
    """A file that is read with a time limit; for one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reading: Future[str] | None = None

    def read(self) -> str:
        """The text. Raises ``ValueError``, ``OSError``; after a ``TimeoutError`` the next call has what was read."""
        if self._reading is None:
            self._reading = Future()
            arguments = self._path, self._reading
            threading.Thread(target=_read, args=arguments, name="pytest-fusion-canary-file", daemon=True).start()
        reading = self._reading
        if not wait([reading], _PATIENCE_S).done:
            raise TimeoutError(f"it was not read in {_PATIENCE_S:g} s")
        self._reading = None
        return reading.result()


def _read(path: Path, into: Future[str]) -> None:
    try:
        with path.open(encoding="utf-8") as file:
            into.set_result(file.read(_LONGEST))
    except (OSError, ValueError) as error:
        into.set_exception(error)


ENVIRONMENT = "PYTEST_FUSION_CANARY"


def mark_of(folder: Path, name: str, rollout: str) -> Path:
    """The file that marks a canary's rollout as tripped, with the reason in it."""
    digest = hashlib.sha256(f"{name}\0{rollout}".encode()).hexdigest()[:12]
    return folder / f"{re.sub(r'[^A-Za-z0-9_]+', '-', name)[:60]}.{digest}.tripped"


def _most_cautious(modes: Iterable[Mode | None]) -> Mode | None:
    return min((mode for mode in modes if mode is not None), key=lambda mode: mode.reach, default=None)


class Control:
    """The mode of one canary: the most cautious of environment, file and call, else the policy's. For any thread.
    ``look`` reads environment and file, off the hot path; ``report`` gets each problem with them once per change."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        report: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._policy = policy
        self._report = report
        self._environment: Mapping[str, str] = os.environ if environment is None else environment
        self._clock = clock
        self.after_fork()
        self._sources: tuple[Mode | None, Mode | None] = (None, None)
        self._called: Mode | None = None
        self._reported: dict[str, str] = {}
        self._filed: Mode | None = None
        self._file_seen = False
        self._file_read_at = clock()
        self.rollout = policy.rollout
        # Why it was tripped.
        self.tripped = self._mark_of_a_trip()

    def after_fork(self) -> None:
        """Gives a new or a forked process free locks, and a file without a reading thread."""
        self._lock = threading.RLock()
        # Held while a file is read; a trip does not wait for it.
        self._looking = threading.Lock()
        self._file = None if self._policy.file is None else PatientFile(Path(self._policy.file))

    @property
    def mode(self) -> Mode:
        """The mode by what `look` read last; touches no file."""
        with self._lock:
            if self.tripped is not None:
                return OFF
            return _most_cautious((*self._sources, self._called)) or self._policy.mode

    def look(self) -> None:
        """Reads environment and file. Raises nothing; for a file that does not answer the caller waits a second."""
        with self._looking:
            sources = self._from_environment(), self._from_file()
        with self._lock:
            self._sources = sources

    def call(self, state: str | None) -> None:
        """Sets the state from within the process; ``None`` removes it. Raises ``CanaryError`` for an unknown state."""
        mode = None if state is None else Mode.parse(state, self._policy.share)
        with self._lock:
            self._called = mode

    def trip(self, reason: str) -> bool:
        """Switches off until the next rollout. True if this call did so, False if it was tripped before."""
        with self._lock:
            if self.tripped is not None:
                return False
            self.tripped = reason
            return True

    def leave_mark(self) -> None:
        """Writes the mark of a trip, for processes that start later. Raises nothing."""
        path, reason = self._mark(), self.tripped
        if path is None or reason is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(reason + "\n", encoding="utf-8")
        except OSError as error:
            follows = "so a restarted process will not know of it"
            self._report_once("mark", f"the mark of a trip was not written, {follows}: {brief(error)}")

    def rearm(self, rollout: str) -> None:
        """Starts another rollout, without the last one's trip. Raises ``CanaryError`` for the same id."""
        with self._lock:
            if rollout == self.rollout:
                raise CanaryError(
                    f"canary {self._name!r}: rollout {rollout!r} is running already, and a trip holds until it ends. "
                    "Give a new id, the same one in every process"
                )
            self.rollout = rollout
            self.tripped = self._mark_of_a_trip()

    def _from_environment(self) -> Mode | None:
        own = f"{ENVIRONMENT}_{re.sub(r'[^A-Za-z0-9]+', '_', self._name).upper()}"
        return _most_cautious(self._parsed(name, self._environment.get(name, "")) for name in (ENVIRONMENT, own))

    def _parsed(self, source: str, text: str) -> Mode | None:
        if not text.strip():
            self._reported.pop(source, None)
            return None
        try:
            mode = Mode.parse(text, self._policy.share)
        except CanaryError as error:
            # The intention is unknown: off is the safe state.
            self._report_once(source, f"{source}: {error}; off until it is corrected")
            return OFF
        self._reported.pop(source, None)
        return mode

    def _from_file(self) -> Mode | None:
        if self._file is None:
            return None
        try:
            self._filed = self._states(self._file.read())
        except (OSError, ValueError, CanaryError) as error:
            missing = isinstance(error, FileNotFoundError) and not self._file_seen
            return None if missing else self._last_known(error)
        self._file_seen = True
        self._file_read_at = self._clock()
        self._reported.pop("file", None)
        return self._filed

    def _last_known(self, error: Exception) -> Mode | None:
        known, stale_s = f"{self._filed or 'no state'} was read from it last", self._policy.stale_s
        mode: Mode | None = OFF
        if not self._file_seen:
            follows = "; off, because it was never read"
        elif self._clock() - self._file_read_at > stale_s:
            follows = f" for {stale_s:g} s; {known}, now off"
        else:
            mode, follows = self._filed, f"; {known} and holds for {stale_s:g} s"
        self._report_once("file", f"{self._policy.file}: {brief(error)}{follows}")
        return mode

    def _states(self, text: str) -> Mode | None:
        """The mode in lines ``name: state``; ``*`` is every canary, ``#`` starts a comment."""
        found: list[Mode] = []
        for number, line in enumerate(text.splitlines(), 1):
            line = line.partition("#")[0].strip()
            name, colon, state = line.partition(":")
            if not line:
                continue
            if not colon:
                raise CanaryError(f"line {number} is {line!r}; expected 'name: state', as in '{self._name}: off'")
            if name.strip() in ("*", self._name):
                found.append(Mode.parse(state, self._policy.share))
        return _most_cautious(found)

    def _report_once(self, source: str, message: str) -> None:
        if self._reported.get(source) != message:
            self._reported[source] = message
            self._report(message)

    def _mark(self) -> Path | None:
        if self._policy.directory is None:
            return None
        return mark_of(Path(self._policy.directory), self._name, self.rollout)

    def _mark_of_a_trip(self) -> str | None:
        path = self._mark()
        if path is None:
            return None
        try:
            return path.read_text(encoding="utf-8", errors="replace").strip() or "tripped by an earlier process"
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return f"{path} cannot be read ({brief(error)}), so it is unknown whether this rollout was tripped"
