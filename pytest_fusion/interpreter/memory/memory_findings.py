"""Wrong accesses of kernels to memory, as plain data, and their destination."""

from __future__ import annotations

import linecache
import operator
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Literal

from pytest_fusion.errors import MemoryFinding
from pytest_fusion.interpreter.scoped import holding, listed

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

# The most frequent reason of each kind.
_ADVICE: dict[str, str] = {
    "out-of-bounds-load": "the mask is missing or too wide, or a stride or offset belongs to another tensor",
    "out-of-bounds-store": "the mask is missing or too wide, or a stride or offset belongs to another tensor",
    "use-after-free": "a pointer outlived its tensor, or was computed from a wrong number",
    "misaligned-access": "a pointer was cast to a wider type; the GPU faults at an address that is no multiple of it",
    "gap-store": "a row stride was taken to be the width; pass the tensor's own stride",
    "unwritten-load": "a scratch buffer from torch.empty is read where no program stored; zero it, or mask the load",
    "racing-stores": "which value remains is undefined on a GPU; use an atomic, or let one program store",
    "racing-load": "whether it gets the old or the new value is undefined on a GPU; use two launches or an atomic",
    "false-hint": "the compiler builds vector accesses on it; drop the hint or make it true",
}


@dataclass(frozen=True, slots=True)
class Site:
    """A line of a kernel or of a function that it calls."""

    kernel: str
    file: str
    line: int

    @property
    def located(self) -> tuple[str, str, int, str]:
        """Kernel, file and line, and the text of the line."""
        return self.kernel, self.file, self.line, self.code

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.line).strip()


@dataclass(frozen=True, slots=True)
class Finding:
    """A kind of wrong access at a line.

    ``argument``: the kernel's parameter that the pointer came from (``None`` if unknown). ``program``: the id x, y, z
    of the first program that did it. ``index``: the element's logical index (``None`` outside the argument).
    ``offset``, ``strides``: in elements. ``count``: lanes. ``other``, ``other_line``: the program (perhaps the same)
    and line on the other side of a race.
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


_KEY = operator.attrgetter("kind", "file", "line", "argument")


@dataclass(slots=True)
class Findings:
    """A list of findings. ``immediate``: raise the first one as ``MemoryFinding`` instead.

    ``tracking`` switches on the checks that need a record of earlier accesses: races, unwritten and gap accesses.
    """

    immediate: bool = False
    tracking: bool = True
    found: list[Finding] = field(default_factory=list)
    # Lines that read between the elements of an argument: legal, but a reason if the result depends on it.
    gap_reads: dict[tuple[str, int, str | None], Site] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        """Add a finding; a later one of the same kind, line and argument only raises the count."""
        if self.immediate:
            raise MemoryFinding(str(finding), finding)
        for position, known in enumerate(self.found):
            if _KEY(known) == _KEY(finding):
                self.found[position] = replace(known, count=known.count + finding.count)
                return
        self.found.append(finding)


_deferred: list[list[Finding]] = []


def deferring() -> AbstractContextManager[list[Finding]]:
    """Collect findings in a list, until it is known whether they matter."""
    return listed(_deferred, [])


@dataclass(slots=True)
class _Running:
    """The current kernel. Its frames know ``runtime_name``, and their files are not below ``triton_folder``.

    ``replayed``: the line whose access is repeated while no kernel runs. ``reported`` counts findings.
    """

    kernel: str = ""
    runtime_name: str = ""
    triton_folder: str = ""
    replayed: Site | None = None
    reported: int = 0


_now = _Running()


def reported() -> int:
    """How many findings there were since the process began, deferred ones included."""
    return _now.reported


def report(finding: Finding) -> None:
    _now.reported += 1
    if _deferred:
        _deferred[-1].append(finding)
    else:
        current().add(finding)


# Launches outside of any session: an access that would corrupt memory raises at once.
_default = Findings(immediate=True, tracking=False)
_sessions: list[Findings] = [_default]


def current() -> Findings:
    """The current destination of findings."""
    return _sessions[-1]


def into(findings: Findings) -> AbstractContextManager[Findings]:
    return listed(_sessions, findings)


def configure(runtime_name: str, triton_folder: str) -> None:
    """Set how the frames of rewritten kernels are recognised."""
    _now.runtime_name, _now.triton_folder = runtime_name, triton_folder


def launching(kernel: str) -> AbstractContextManager[None]:
    return holding(_now, kernel=kernel)


def replaying() -> AbstractContextManager[None]:
    """Allow ``replay_at``, since no kernel runs whose frame has a line."""
    return holding(_now, replayed=None)


def replay_at(site: Site) -> None:
    """Set the line whose access is repeated now."""
    _now.replayed = site


def site() -> Site:
    """The current line of the kernel or of its device function."""
    if _now.replayed is not None:
        return _now.replayed
    name, folder = _now.runtime_name, _now.triton_folder
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if name in frame.f_globals and not frame.f_code.co_filename.startswith(folder):
            return Site(_now.kernel, frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return Site(_now.kernel, "", 0)
