"""`PatientFile`: a small text file, read in its own thread because a network disk may never answer."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from pathlib import Path

# A file of states is a few lines; what is longer is another file.
_LONGEST = 1 << 20


class PatientFile:
    """A file that is read with a time limit, ``patience_s``; for one thread at a time."""

    def __init__(self, path: Path, patience_s: float = 1.0) -> None:
        self._path, self._patience_s = path, patience_s
        self._reading: Future[str] | None = None

    def read(self) -> str:
        """The text. Raises ``ValueError`` and ``OSError``, as ``TimeoutError`` where the disk does not answer.

        A reading that takes longer goes on, and the next call returns what it read.
        """
        if self._reading is None:
            self._reading = Future()
            arguments = self._path, self._reading
            threading.Thread(target=_read, args=arguments, name="pytest-fusion-canary-file", daemon=True).start()
        reading = self._reading
        if not wait([reading], self._patience_s).done:
            raise TimeoutError(f"it was not read in {self._patience_s:g} s")
        self._reading = None
        return reading.result()


def _read(path: Path, into: Future[str]) -> None:
    try:
        with path.open(encoding="utf-8") as file:
            into.set_result(file.read(_LONGEST))
    except (OSError, ValueError) as error:
        into.set_exception(error)
