"""GPUs to compile for, such as `sm_80`, and the resources that one kernel takes there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from pytest_fusion.errors import FusionError
from pytest_fusion.spec.wording import did_you_mean

_WARP = 32
# CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability". From 7.0 on a thread has up to 255
# registers, allocated to warps in units of 256, four warps at a time (cuda_occupancy.h).
_REGISTERS = 65536
_MOST_REGISTERS = 255
_REGISTER_UNIT = 256
_WARP_UNIT = 4
_MOST_THREADS = 1024
_KIB = 1024
# TMEM of compute capability 10.x has 512 columns; Triton rejects a launch that needs more.
_TENSOR_COLUMNS = 512
# From compute capability 9.0 on, a binary's static shared memory includes the system's reserved part.
_DECLARES_RESERVED = 9


@dataclass(frozen=True, slots=True)
class Target:
    """A compute capability and its limits, in bytes; ``multiprocessors`` are those of ``device``. ``shared`` is a
    multiprocessor's, ``shared_reserved`` the system's part of it."""

    name: str
    major: int
    minor: int
    warps: int
    blocks: int
    shared: int
    shared_reserved: int
    device: str
    multiprocessors: int

    @property
    def shared_per_block(self) -> int:
        return self.shared - self.shared_reserved

    def static(self, declared: int) -> int:
        """The static shared memory of a kernel whose binary declares ``declared`` bytes."""
        return max(0, declared - self.shared_reserved) if self.major >= _DECLARES_RESERVED else declared

    @property
    def tensor_columns(self) -> int:
        """Columns of tensor memory of a block; 0 if there is none."""
        return _TENSOR_COLUMNS if self.major == 10 else 0


def _target(name: str, warps: int, blocks: int, shared: int, device: str, multiprocessors: int) -> Target:
    major, minor = divmod(int(name.removeprefix("sm_")), 10)
    reserved = _KIB if major >= 8 else 0
    return Target(name, major, minor, warps, blocks, shared * _KIB, reserved, device, multiprocessors)


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _target("sm_75", 32, 16, 64, "T4", 40),
        _target("sm_80", 64, 32, 164, "A100", 108),
        _target("sm_86", 48, 16, 100, "A40", 84),
        _target("sm_87", 48, 16, 164, "Orin", 16),
        _target("sm_89", 48, 24, 100, "L40S", 142),
        _target("sm_90", 64, 32, 228, "H100", 132),
        _target("sm_100", 64, 32, 228, "B200", 148),
        _target("sm_103", 64, 32, 228, "B300", 148),
        _target("sm_120", 48, 24, 100, "RTX 5090", 170),
    )
}


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The warps of a kernel that fit on a multiprocessor at once, the most possible, and the limiting resource."""

    warps: int
    most: int
    limited_by: str


def parse_targets(text: str) -> tuple[Target, ...]:
    """``"sm_80, sm_90"`` as targets, each once. Raises ``FusionError`` for a name not in ``TARGETS``."""
    found: dict[str, Target] = {}
    for word in filter(None, re.split(r"[\s,]+", text)):
        # Triton always compiles for architecture-specific features.
        name = word.lower().removesuffix("a")
        if name not in TARGETS:
            raise FusionError(f"--fusion-targets {word!r} is no target{did_you_mean(name, TARGETS)}")
        found[name] = TARGETS[name]
    if not found:
        raise FusionError(f"--fusion-targets {text!r} names no target; for example --fusion-targets sm_80,sm_90")
    return tuple(found.values())


def occupancy(target: Target, kernel: Resources) -> Occupancy:
    """Theoretical occupancy by a kernel's blocks; one that does not fit has 0 warps."""
    warps, registers = kernel.warps, kernel.registers
    unit = _KIB // 8 if target.major >= 8 else _KIB // 4
    held = -(-(kernel.shared + target.shared_reserved) // unit) * unit
    per_warp = -(-max(registers, 1) * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = _REGISTERS // per_warp // _WARP_UNIT * _WARP_UNIT // warps
    limits = {
        "warps": target.warps // warps,
        "blocks": target.blocks,
        "registers": by_registers if registers <= _MOST_REGISTERS else 0,
        "shared memory": target.shared // held if held else target.blocks,
    }
    if warps * _WARP > _MOST_THREADS:
        limits["threads of a block"] = 0
    limited_by = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[limited_by] * warps, target.warps, limited_by)


Status = Literal["compiled", "refused", "unknown"]


@dataclass(frozen=True, slots=True)
class Resources:
    """One kernel, as one target's compiler sees it. ``status`` is ``"compiled"``, ``"refused"`` (it cannot run there,
    for ``reason``, at ``line`` of ``file`` if known) or ``"unknown"`` (for ``reason``). Registers and ``local_bytes``
    (spills and indexed arrays) are per thread, bytes of shared memory per block. ``seconds`` is the compile time,
    ``None`` for a result from Triton's cache."""

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
    # How a GPU's own choice may differ from what was compiled.
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Resources:
        held = data.get("occupancy")
        return cls(**{**data, "occupancy": Occupancy(**held) if held is not None else None})

    def doubted(self, reason: str) -> Resources:
        """The record where a GPU may launch something else: not a refusal then, and ``reason`` is why."""
        if self.status != "refused":
            return self
        return replace(self, status="unknown", reason=f"{reason} ({self.reason})")

    @property
    def spills(self) -> bool:
        """Whether values leave the registers: local memory is written, and is not a declared array."""
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


def excess(target: Target, kernel: Resources) -> str:
    """The resources that ``kernel`` needs beyond those of a block of ``target``, as text; empty if it fits."""
    if kernel.shared > target.shared_per_block:
        return (
            f"it takes {kernel.shared} bytes of shared memory, a block on {target.name} has {target.shared_per_block}: "
            "no launch succeeds there; take a smaller tile or fewer num_stages"
        )
    if kernel.tensor_columns > target.tensor_columns:
        return (
            f"it takes {kernel.tensor_columns} columns of tensor memory, a block on {target.name} has "
            f"{target.tensor_columns}: no launch succeeds there; take a smaller tile"
        )
    held = occupancy(target, kernel)
    if held.warps == 0:
        return (
            f"a block of {kernel.warps} warps with {kernel.registers} registers a thread exceeds what {target.name} "
            f"has ({held.limited_by}): no launch succeeds there; take fewer num_warps or a smaller tile"
        )
    return ""


def figures(found: Iterable[Resources]) -> dict[str, int]:
    """Every exact figure by ``target/kernel/name``; ``kernel#2`` is a second specialisation, by first launch."""
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
