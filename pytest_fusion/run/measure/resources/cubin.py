"""Registers, local memory and instructions of a compiled kernel's binary, read with the tools that Triton ships."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 60
_USAGE = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")
# `/*0a10*/   @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;`
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_WIDE = r"[\w.]*\.(?:128|256|ENL2\.256)\b"

# SASS of sm_75 to sm_120 (CUDA Binary Utilities, "Instruction Set Reference"): the opcodes of each count.
COUNTED: dict[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        # mma.sync: HMMA, IMMA, ...; wgmma: HGMMA, QGMMA, ...; tcgen05: UTCHMMA, UTCQMMA, ...
        "tensor_core": r"(?:[HIBDQO]MMA|[HIBQ]GMMA|UTC[HIQO]?MMA)\b",
        "global_loads": r"LDG\b",
        "global_loads_wide": rf"LDG\b{_WIDE}",
        "global_stores": r"STG\b",
        "global_stores_wide": rf"STG\b{_WIDE}",
        "async_copies": r"LDGSTS\b",
        "bulk_copies": r"(?:UTMALDG|UTMASTG|UTMAREDG|UBLKCP)\b",
        "atomics": r"(?:ATOMG?|RED|REDG)\b",
        "barriers": r"BAR\b",
        "spill_loads": r"LDL\b",
        "spill_stores": r"STL\b",
    }.items()
}


class NoToolError(Exception):
    """The binary cannot be read on this machine."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Registers and bytes of local memory of a thread, bytes of static shared memory of a block, instruction counts."""

    registers: int
    local_bytes: int
    shared_static: int
    instructions: dict[str, int]


def read(cubin: bytes, tool: str) -> Usage:
    """The usage in ``cubin``; raises ``NoToolError`` if ``cuobjdump`` at ``tool`` fails or its output is unreadable."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        try:
            done = subprocess.run(
                [tool, "-res-usage", "-sass", str(path)], capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoToolError(f"{tool} does not run: {error}") from error
    found = {name: int(value) for name, value in _USAGE.findall(done.stdout + done.stderr)}
    opcodes = Counter(_INSTRUCTION.findall(done.stdout))
    if "REG" not in found or not opcodes:
        message = (done.stderr or done.stdout).strip().partition("\n")[0]
        raise NoToolError(f"{tool} does not describe the kernel (status {done.returncode}): {message[:200]}")
    return Usage(
        registers=found["REG"],
        local_bytes=found.get("STACK", 0) + found.get("LOCAL", 0),
        shared_static=found.get("SHARED", 0),
        instructions=counts(opcodes),
    )


def counts(opcodes: Counter[str]) -> dict[str, int]:
    """The number of instructions of each kind in ``COUNTED``, zeros included."""
    return {
        name: sum(number for opcode, number in opcodes.items() if pattern.match(opcode))
        for name, pattern in COUNTED.items()
    }
