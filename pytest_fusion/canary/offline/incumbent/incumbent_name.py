"""`IncumbentName`: names a git revision, another environment's interpreter, or a function."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pytest_fusion.errors import CanaryError
from pytest_fusion.spec.wording import did_you_mean

Kind = Literal["revision", "python", "function"]

_FORMS = "git:REVISION (or a bare revision), python:/path/to/python, or module:function"
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True)
class IncumbentName:
    """A parsed name: ``target`` is the revision, the interpreter's absolute path, or ``module:function``."""

    kind: Kind
    target: str

    def __str__(self) -> str:
        prefix = {"revision": "git:", "python": "python:", "function": ""}[self.kind]
        return f"{prefix}{self.target}"


def parse(text: str, start: Path) -> IncumbentName:
    """Parses a name, with paths relative to ``start``. Raises ``CanaryError`` for an invalid one."""
    text = text.strip()
    prefix, colon, rest = text.partition(":")
    if not text or (colon and not rest):
        raise CanaryError(f"the incumbent {text!r} has no name; expected {_FORMS}")
    if prefix == "git" and colon:
        return IncumbentName("revision", rest)
    if prefix == "python" and colon:
        return IncumbentName("python", _interpreter(rest, start))
    if not colon:
        if os.sep in text and os.access(start / Path(text).expanduser(), os.X_OK):
            raise CanaryError(f"the incumbent {text!r} is a program; for an environment's interpreter: python:{text}")
        return IncumbentName("revision", text)
    if _FUNCTION.fullmatch(text):
        return IncumbentName("function", text)
    hint = did_you_mean(prefix, ("git", "python"))
    raise CanaryError(f"the incumbent {text!r} cannot be read; expected {_FORMS}{hint if '?' in hint else ''}")


def _interpreter(text: str, start: Path) -> str:
    # Not resolved: what the link in an environment's bin points to is the interpreter without the environment.
    path = start.absolute() / Path(text).expanduser()
    if path.is_dir():
        inside = path / "bin" / "python"
        hint = f"; did you mean python:{inside}?" if inside.exists() else "; name the interpreter in it"
        raise CanaryError(f"the incumbent python:{text} is a folder{hint}")
    if not os.access(path, os.X_OK):
        raise CanaryError(f"the incumbent python:{text}: there is no program {path}; name an environment's bin/python")
    return str(path)
