"""What a kernel did to memory that it must not do, as plain data."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pytest_fusion.errors import MemoryFinding

Kind = Literal[
    "out-of-bounds-load",
    "out-of-bounds-store",
    "use-after-free",
    "misaligned-access",
    "gap-store",
    "unwritten-load",
    "racing-stores",
    "racing-load",
    "false-hint",
]

# What is known to be the reason most of the time, and where to look.
_ADVICE: dict[str, str] = {
    "out-of-bounds-load": "the mask is missing or too wide, or a stride or offset belongs to another tensor",
    "out-of-bounds-store": "the mask is missing or too wide, or a stride or offset belongs to another tensor",
    "use-after-free": "a pointer was kept longer than its tensor, or was computed from a wrong number",
    "misaligned-access": "a pointer was cast to a wider type; the GPU faults at an address that is no multiple of it",
    "gap-store": "a row stride was taken to be the width; pass the tensor's own stride",
    "unwritten-load": "a scratch buffer from torch.empty is read where no program stored; zero it, or mask the load",
    "racing-stores": "which of them stays is chance on a GPU; use an atomic, or let one program store",
    "racing-load": "whether it sees the old or the new value is chance on a GPU; use two launches or an atomic",
    "false-hint": "the compiler builds vector accesses on it; drop the hint or make it true",
}


@dataclass(frozen=True, slots=True)
class Site:
    """A line of a kernel or of a function that it calls."""

    kernel: str
    file: str
    line: int

    @property
    def code(self) -> str:
        """The text of the line."""
        return linecache.getline(self.file, self.line).strip()


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of wrong access at one line.

    ``argument`` is the kernel's parameter that the pointer came from (``None`` if unknown), ``program`` the id x, y, z
    of the first program that did it, ``index`` the element's logical index in the argument (``None`` outside of it),
    ``offset`` its distance in elements from the argument's first one, ``shape`` and ``strides`` (in elements) those
    of the argument. ``count`` is how many lanes did it, ``other`` the program on the other side of a race (the same
    one when two of its own lanes race), ``other_line`` where that one was.
    """

    kind: Kind
    kernel: str
    file: str
    line: int
    code: str
    argument: str | None = None
    program: tuple[int, int, int] = (0, 0, 0)
    index: tuple[int, ...] | None = None
    offset: int | None = None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dtype: str = ""
    count: int = 1
    other: tuple[int, int, int] | None = None
    other_line: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        where = f"{Path(self.file).name}:{self.line}"
        code = f" `{self.code}`" if self.code else ""
        lanes = f"; {self.count} lanes in all" if self.count > 1 else ""
        return f"{self.kind} in {self.kernel} at {where}{code}: {self._what()}{lanes}. Likely {_ADVICE[self.kind]}"

    def _what(self) -> str:
        program = f"program {self.program}"
        target = self._target()
        by = ""
        if self.other is not None:
            line = f" at line {self.other_line}" if self.other_line not in (None, self.line) else ""
            by = f"another lane of it{line}" if self.other == self.program else f"program {self.other}{line}"
        return {
            "out-of-bounds-load": f"{program} loads {target}",
            "out-of-bounds-store": f"{program} stores to {target}",
            "use-after-free": f"{program} uses {target}",
            "misaligned-access": f"{program} accesses {target}",
            "gap-store": f"{program} stores to {target}",
            "unwritten-load": f"{program} loads {target}, which nothing has written",
            "racing-stores": f"{program} stores to {target}, where {by} stores another value",
            "racing-load": f"{program} loads {target}, which {by} stores in the same launch",
            "false-hint": f"{program}: {self.detail}",
        }[self.kind]

    def _target(self) -> str:
        name = self.argument or "an address"
        layout = f" (shape {self.shape}, strides {self.strides}, {self.dtype})" if self.dtype else ""
        if self.index is not None:
            return f"{name}[{', '.join(map(str, self.index))}]{layout}"
        offset = f" at element offset {self.offset}" if self.offset is not None else ""
        return f"{name}{offset}{f', {self.detail}' if self.detail else ''}{layout}"


@dataclass(slots=True)
class Findings:
    """Where findings go. ``immediate``: the first one is raised as ``MemoryFinding``, else they are collected.

    ``tracking`` switches on all that needs a record of earlier accesses: races, unwritten and gap accesses.
    """

    immediate: bool = False
    tracking: bool = True
    found: list[Finding] = field(default_factory=list)
    # Lines that read between the elements of an argument: legal, but a reason when the result depends on it.
    gap_reads: dict[tuple[str, int, str | None], Site] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        """Remember a finding; a later one of the same kind, line and argument only counts."""
        if self.immediate:
            raise MemoryFinding(str(finding), finding)
        for position, known in enumerate(self.found):
            if (known.kind, known.file, known.line, known.argument) == (
                finding.kind,
                finding.file,
                finding.line,
                finding.argument,
            ):
                self.found[position] = replace(known, count=known.count + finding.count)
                return
        self.found.append(finding)


_deferred: list[list[Finding]] = []


@contextmanager
def deferring() -> Iterator[list[Finding]]:
    """Hold findings back in a list, until it is known whether they matter."""
    held: list[Finding] = []
    _deferred.append(held)
    try:
        yield held
    finally:
        _deferred.pop()


_reported = 0


def reported() -> int:
    """How many findings there have been since the process began, with those that were held back."""
    return _reported


def report(finding: Finding) -> None:
    """Pass a finding on to where findings go now."""
    global _reported
    _reported += 1
    if _deferred:
        _deferred[-1].append(finding)
    else:
        current().add(finding)


# Launches outside of any session: what would be corrupted is refused at once.
_default = Findings(immediate=True, tracking=False)
_sessions: list[Findings] = [_default]


def current() -> Findings:
    """Where findings go now."""
    return _sessions[-1]


@contextmanager
def into(findings: Findings) -> Iterator[Findings]:
    """Send findings to ``findings``."""
    _sessions.append(findings)
    try:
        yield findings
    finally:
        _sessions.pop()


_kernel = ""
_runtime_name = ""
_triton_folder = ""


def configure(runtime_name: str, triton_folder: str) -> None:
    """How a frame of a rewritten kernel is known: the global ``runtime_name``, and a file that is not Triton's own."""
    global _runtime_name, _triton_folder
    _runtime_name, _triton_folder = runtime_name, triton_folder


@contextmanager
def launching(kernel: str) -> Iterator[None]:
    """Name the kernel that runs now."""
    global _kernel
    before, _kernel = _kernel, kernel
    try:
        yield
    finally:
        _kernel = before


_there: Site | None = None


@contextmanager
def standing() -> Iterator[Callable[[Site], None]]:
    """Yields what is told of each line that the body stands for, since no kernel runs in it."""
    global _there

    def at(site: Site) -> None:
        global _there
        _there = site

    before = _there
    try:
        yield at
    finally:
        _there = before


def site() -> Site:
    """The line of the kernel, or of its device function, that runs now."""
    if _there is not None:
        return _there
    frame = sys._getframe(1)
    at: Site | None = None
    while frame is not None:
        if _runtime_name in frame.f_globals and not frame.f_code.co_filename.startswith(_triton_folder):
            at = Site(_kernel, frame.f_code.co_filename, frame.f_lineno)
            break
        frame = frame.f_back  # type: ignore[assignment]
    return at or Site(_kernel, "", 0)
