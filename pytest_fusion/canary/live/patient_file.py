"""`PatientFile`: a small text file, read in its own thread because a network disk may never answer."""

from __future__ import annotations

import threading
from pathlib import Path

# A file of states is a few lines; what is longer is another file.
_LONGEST = 1 << 20


class _Reading(threading.Thread):
    def __init__(self, path: Path) -> None:
        super().__init__(name="pytest-fusion-canary-file", daemon=True)
        self._path = path
        self.text = ""
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with self._path.open(encoding="utf-8") as file:
                self.text = file.read(_LONGEST)
        except (OSError, ValueError) as error:
            self.error = error


class PatientFile:
    """A file that is read with a time limit, ``patience_s``; for one thread at a time."""

    def __init__(self, path: Path, patience_s: float = 1.0) -> None:
        self._path, self._patience_s = path, patience_s
        self._reading: _Reading | None = None

    def read(self) -> str:
        """The text. Raises ``ValueError`` and ``OSError``, as ``TimeoutError`` where the disk does not answer.

        A reading that takes longer goes on, and the next call returns what it read.
        """
        if self._reading is None:
            self._reading = _Reading(self._path)
            self._reading.start()
        reading = self._reading
        reading.join(self._patience_s)
        if reading.is_alive():
            raise TimeoutError(f"it was not read in {self._patience_s:g} s")
        self._reading = None
        if reading.error is not None:
            raise reading.error
        return reading.text
