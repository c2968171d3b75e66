"""Limits and ends every child process: its time limit, how to kill it, how it ended, its last output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import IO, Final

# The key of a note that names the kernel that is being compiled, and how long that may take: longer than other steps.
COMPILING: Final = "compiling"
_COMPILING_S: Final = 300.0

# A child that worked for this share of its limit is at its end; one that waited for so many limits is stuck.
_BUSY: Final = 0.8
_STUCK: Final = 4.0

# How often to look at a silent child. Its end shows at once as the end of the pipe, unless a grandchild holds that.
_POLL_S: Final = 0.05

# faulthandler's first words, and how far from the end they may be: 100 frames of 300 characters.
_FAULT: Final = b"Fatal Python error: "
_FAULT_BYTES: Final = 32 * 1024
_TAIL_BYTES: Final = 8 * 1024


class TimeLimit:
    """The limit of one step of the process ``pid``; ``seconds=None`` is no limit. It counts work, not waiting for a
    core (on a busy machine a row of 2^17 elements takes a minute to compile, which is not the kernel's fault), up to a
    multiple of the limit. ``wall_clock`` counts waiting too, for other programs' work."""

    def __init__(self, pid: int, seconds: float | None, *, wall_clock: bool = False) -> None:
        self._pid, self.seconds, self._wall_clock = pid, seconds, wall_clock
        self.renew()

    def renew(self) -> None:
        """Begin the next step."""
        self._begun, self._worked = time.monotonic(), self._worked_s()

    def pause(self) -> float:
        """Seconds to wait for output before the next look at the process."""
        left = _POLL_S if self.seconds is None else self._begun + self.seconds - time.monotonic()
        return left if 0 < left < _POLL_S else _POLL_S

    def passed(self, *, compiling: bool) -> bool:
        waited = time.monotonic() - self._begun
        if self.seconds is None or waited < self.seconds:
            return False
        if compiling:
            return waited >= max(_COMPILING_S, self.seconds)
        worked = self._worked_s() - self._worked
        return self._wall_clock or worked >= _BUSY * self.seconds or waited >= _STUCK * self.seconds

    def _worked_s(self) -> float:
        """Core seconds that the process has used, if the system shows them; else more than any limit."""
        try:
            words = stat_words(self._pid)
            return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return time.monotonic()


def stat_words(pid: int) -> list[str]:
    """What Linux states of a process: first its state; utime and stime are the 12th and 13th. Raises ``OSError``."""
    # The name before them may have blanks and brackets.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def kill_group(pid: int) -> None:
    """Kill the process group ``pid``: a process and all that it started, which would occupy a GPU."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def end_process(process: subprocess.Popen[bytes], seconds: float) -> int:
    """The exit status of a group's leader, which has ``seconds`` to end by itself; then the group is killed."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        kill_group(process.pid)
        process.wait()
    return process.returncode


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def fault_position(file: IO[bytes]) -> int:
    """The start of faulthandler's last stack; the end of the file if there is none."""
    size = file.seek(0, os.SEEK_END)
    start = file.seek(max(0, size - _FAULT_BYTES))
    found = file.read().rfind(_FAULT)
    return size if found < 0 else start + found


def last_output(file: IO[bytes]) -> str:
    """The beginning of the last stack that faulthandler wrote, else the end of the file."""
    size, fault = file.seek(0, os.SEEK_END), fault_position(file)
    file.seek(fault if fault < size else max(0, size - _TAIL_BYTES))
    return file.read(_TAIL_BYTES).decode("utf-8", "replace")


def last_line(text: str) -> str:
    """The last non-empty line, or an empty string."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
