"""Runs Triton kernels on the CPU and checks every memory access, without pytest.

    from pytest_fusion.interpreter import interpreted   # before Triton is imported
    with interpreted() as session:
        kernel[grid](x, y, n, BLOCK=1024)

Importing this module switches Triton's interpreter on for the whole process (``TRITON_INTERPRET=1``) and corrects what
it computes wrongly. A bad access raises ``MemoryFinding`` at its line, before it happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from pytest_fusion.errors import FusionError, MemoryFinding, NotModelledError
from pytest_fusion.interpreter.bridge import hook, lane_state
from pytest_fusion.interpreter.control.executor import Execution, Mode, executing, listening
from pytest_fusion.interpreter.memory.memory_findings import Finding, Findings, into
from pytest_fusion.interpreter.memory.regions import described_by

__all__ = ["Execution", "Finding", "MemoryFinding", "NotModelledError", "Session", "interpreted"]

hook.enable()


@dataclass(slots=True)
class Session:
    """How each launch of the block ran, in order, and with ``findings="collect"`` its wrong accesses."""

    launches: list[Execution] = field(default_factory=list)
    _findings: Findings = field(default_factory=Findings)

    @property
    def findings(self) -> list[Finding]:
        """Wrong accesses, one for each kind, line and argument."""
        return list(self._findings.found)

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences from a GPU's computation since the process began."""
        return lane_state.notes()


@contextmanager
def interpreted(
    *, executor: Mode = "batched", findings: Literal["raise", "collect"] = "raise", checked: bool = True
) -> Iterator[Session]:
    """Run the Triton launches of the block on the CPU and check each access.

    ``executor``: ``"batched"`` runs all programs of a grid at once, ``"serial"`` one after the other (in the order of
    the grid, the last dimension fastest). ``checked=False`` leaves out the checks that need a record of earlier
    accesses (races, unwritten and gap accesses); accesses outside of a tensor's storage are always rejected. In the
    block ``torch.empty`` and the like give memory that counts as unwritten, and ``is_cuda`` of CPU tensors is true if
    torch has no GPU, because most launchers assert it.

    Raises ``FusionError`` if Triton was imported before this module without ``TRITON_INTERPRET=1``, and
    ``MemoryFinding`` at a wrong access unless findings are collected. Lanes of an access that leave their memory are
    never performed; of racing stores one wins.
    """
    import torch

    from pytest_fusion.interpreter.bridge.modelled_device import posing_as_cuda
    from pytest_fusion.interpreter.memory.fresh import FreshMemory

    import_triton()
    session = Session(_findings=Findings(immediate=findings == "raise", tracking=checked))
    fresh = FreshMemory()
    with (
        executing(executor),
        listening(session.launches.append),
        into(session._findings),
        described_by(fresh),
        posing_as_cuda(torch),
        fresh,
    ):
        yield session


def import_triton() -> None:
    """Import Triton and correct it. Raises ``FusionError`` if it is too late for that."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise FusionError("Triton is not installed: pip install 'pytest-fusion[kernels]'") from error
    if not lane_state.installed():
        raise FusionError(
            lane_state.problem()
            or "Triton was imported before pytest_fusion.interpreter: import that first, or set TRITON_INTERPRET=1"
        )
