"""`Resources`: what one kernel takes of one target, or why that is not known, or why it does not compile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from pytest_fusion.run.measure.resources.targets import Occupancy, Target, occupancy

Status = Literal["compiled", "refused", "unknown"]


@dataclass(frozen=True, slots=True)
class Resources:
    """One kernel, as one target's compiler sees it.

    ``status`` is ``"compiled"``, ``"refused"`` (it cannot run there: ``reason`` says why, ``line`` is the line of
    ``file`` where it has one) or ``"unknown"`` (nothing was found out: ``reason``). Registers and ``local_bytes``
    (spills, and arrays that are indexed) are those of a thread, shared memory, in bytes, that of a block. ``seconds``
    is what compiling took, ``None`` where the result came from Triton's cache.
    """

    kernel: str
    target: str
    status: Status = "compiled"
    reason: str = ""
    file: str = ""
    line: int = 0
    registers: int = 0
    local_bytes: int = 0
    shared_static: int = 0
    shared_dynamic: int = 0
    tensor_columns: int = 0
    warps: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    occupancy: Occupancy | None = None
    seconds: float | None = None
    # Refused because a launch would ask for more than the target has, which another tile would not.
    exceeds: bool = False
    # How a GPU's own choice may differ from what was compiled.
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Resources:
        held = data.get("occupancy")
        return cls(**{**data, "occupancy": Occupancy(**held) if held is not None else None})

    def doubted(self, reason: str, *, only_excess: bool = False) -> Resources:
        """The record where a GPU may launch something else: not a refusal then, and ``reason`` is why."""
        if self.status != "refused" or (only_excess and not self.exceeds):
            return self
        return replace(self, status="unknown", reason=f"{reason} ({self.reason})")

    @property
    def spills(self) -> bool:
        """Whether values leave the registers: local memory that is written, not an array that the kernel declared."""
        return self.local_bytes > 0 and self.instructions.get("spill_stores", 1) > 0

    @property
    def shared(self) -> int:
        return self.shared_static + self.shared_dynamic

    def __str__(self) -> str:
        where = f"{self.kernel} for {self.target}"
        if self.status == "unknown":
            return f"{where}: unknown, {self.reason}"
        if self.status == "refused":
            return f"{where}{f' ({self.file}:{self.line})' if self.line else ''}: {self.reason}"
        held = self.occupancy
        full = f", {held.warps} of {held.most} warps ({held.limited_by})" if held is not None else ""
        spilled = f", {self.local_bytes} bytes of local memory" if self.local_bytes else ""
        return f"{where}: {self.registers} registers{spilled}, {self.shared} bytes of shared memory{full}"


def excess(target: Target, *, registers: int, shared: int, warps: int, tensor_columns: int) -> str:
    """In words, what a kernel needs beyond the resources of a block of ``target``; empty where it fits."""
    if shared > target.shared_per_block:
        return (
            f"it takes {shared} bytes of shared memory, a block on {target.name} has {target.shared_per_block}: no "
            "launch succeeds there; take a smaller tile or fewer num_stages"
        )
    if tensor_columns > target.tensor_columns:
        return (
            f"it takes {tensor_columns} columns of tensor memory, a block on {target.name} has "
            f"{target.tensor_columns}: no launch succeeds there; take a smaller tile"
        )
    held = occupancy(target, warps=warps, registers=registers, shared=shared)
    if held.warps == 0:
        return (
            f"a block of {warps} warps with {registers} registers a thread exceeds what {target.name} has "
            f"({held.limited_by}): no launch succeeds there; take fewer num_warps or a smaller tile"
        )
    return ""


def figures(found: Iterable[Resources]) -> dict[str, int]:
    """Every exact figure of what compiled, by ``target/kernel/name``; a kernel's second specialisation is ``kernel#2``.

    Numbers follow the order of ``found``, which is that of first launch.
    """
    flat: dict[str, int] = {}
    seen: dict[tuple[str, str], int] = {}
    for one in found:
        number = seen[one.target, one.kernel] = seen.get((one.target, one.kernel), 0) + 1
        if one.status != "compiled":
            continue
        head = f"{one.target}/{one.kernel}" + (f"#{number}" if number > 1 else "")
        own = {
            "registers": one.registers,
            "local_bytes": one.local_bytes,
            "shared_bytes": one.shared,
            "warps": one.warps,
            **one.instructions,
        }
        if one.tensor_columns:
            own["tensor_columns"] = one.tensor_columns
        if one.occupancy is not None:
            own["occupancy_warps"] = one.occupancy.warps
        flat.update({f"{head}/{name}": value for name, value in own.items()})
    return flat
