"""What children of the tests do, and whether they still live."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_fusion.run.process.fork import Channel

LINUX = sys.platform.startswith("linux")


def forever(channel: Channel) -> None:
    channel.note({"case": 7})
    while True:
        pass


def segfault(channel: Channel) -> None:
    channel.note({"case": 3})
    ctypes.string_at(0)


def alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie that init has not collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def interruptible(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """A process that Ctrl-C ends, also where this one runs in the background of a shell and ignores SIGINT."""
    return subprocess.Popen(
        command,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - nothing else has a lock here
        **options,
    )
