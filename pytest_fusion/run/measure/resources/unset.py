"""Registers that a kernel's binary computes with though nothing has written them: the assembler's own mistakes.

ptxas 12.8 made such code of an attention kernel for sm_90: the address of the second 16 values was left to what the
kernel before had in that register, so they counted for nothing or the launch read illegally, on an H200 and by its size
alone. No interpreter shows that, and a GPU shows it now and then. Only uniform registers are looked at, which hold
addresses and descriptors; others may be read half written (``PRMT R4, RZ, 0x7610, R4`` sets one half).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

# `/*0a10*/   @!UP0 UIADD3 UR22, UP0, UR22, 0x40, URZ ;`
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.MULTILINE)
_REGISTER = re.compile(r"\bUR(\d+)\b")
# `UR4, ...`, or behind predicates that are written as well: `UP0, UR4, ...`.
_WRITTEN = re.compile(r"(?:U?P(?:\d|T),\s*)*UR(\d+)\b")
_FUNCTION = re.compile(r"^\s*Function : ", re.MULTILINE)
_TARGET = re.compile(r"\b0x([0-9a-f]+)$")
# Arithmetic, which makes no sense of what is undefined; a move may pass on what nobody looks at.
_ARITHMETIC = ("UIADD3", "UIMAD", "ULEA", "USHF")
_SINGLE = (*_ARITHMETIC, "ULOP3", "UMOV", "UPRMT", "USEL", "USGXT", "UFLO", "UPOPC", "ULDC", "R2UR", "S2UR", "REDUX")
# What a register's name stands for where the instruction is not known: as much as any writes.
_MOST = 4
# Where control goes from here is not to be read off the listing.
_ELSEWHERE = ("BRX", "JMP", "JMX", "CALL.ABS", "WARPSYNC.COLLECTIVE", "LEPC")


@dataclass(frozen=True, slots=True)
class _Instruction:
    address: int
    predicated: bool
    name: str
    operands: str

    @property
    def written(self) -> range:
        """The uniform registers that it writes, rather too many than too few."""
        found = _WRITTEN.match(self.operands)
        if found is None or self.name.startswith(("ST", "RED.", "ATOM", "UST", "UTMA", "UBLK")):
            return range(0)
        first = int(found[1])
        if ".256" in self.name:
            return range(first, first + 8)
        if ".64" in self.name or ".WIDE" in self.name:
            return range(first, first + 2)
        return range(first, first + (1 if self._named(_SINGLE) and ".128" not in self.name else _MOST))

    @property
    def read(self) -> list[int]:
        """Those that it computes with."""
        if not self._named(_ARITHMETIC):
            return []
        return [int(number) for number in _REGISTER.findall(self.operands.partition(",")[2])]

    def _named(self, names: Sequence[str]) -> bool:
        return self.name.partition(".")[0] in names

    def __str__(self) -> str:
        return f"{self.name} {self.operands} at 0x{self.address:x}"


def unset(listing: str) -> str:
    """The first instruction of a SASS ``listing`` that reads an unwritten register, in words; empty where none does.

    Empty too where the way of control is not known: no honest kernel is accused for what cannot be read here.
    """
    code = [_Instruction(int(at, 16), bool(by), name, rest) for at, by, name, rest in _INSTRUCTION.findall(listing)]
    if len(_FUNCTION.findall(listing)) > 1 or any(one.name.startswith(_ELSEWHERE) for one in code):
        return ""
    written = _written_before(code)
    for one, before in zip(code, written, strict=True):
        for register in one.read:
            if before is not None and not before >> register & 1:
                return f"UR{register}, which nothing wrote before ({one})"
    return ""


def _written_before(code: Sequence[_Instruction]) -> list[int | None]:
    """Bits of the registers that some way to each instruction has written; ``None`` where there is no way."""
    after = _successors(code)
    found: list[int | None] = [None] * len(code)
    waiting = deque([0] if code else [])
    if code:
        found[0] = 0
    while waiting:
        index = waiting.popleft()
        now = found[index] or 0
        for register in code[index].written:
            now |= 1 << register
        for following in after[index]:
            known = found[following]
            if known is None or now & ~known:
                found[following] = now | (known or 0)
                waiting.append(following)
    return found


def _successors(code: Sequence[_Instruction]) -> list[set[int]]:
    """Where control may go from each instruction: rather too many places than too few."""
    index = {one.address: number for number, one in enumerate(code)}
    returns = {number + 1 for number, one in enumerate(code) if one.name.startswith("CALL")}
    # A warp that was split meets again where its BSSY says.
    meets = {index[at] for one in code if one.name.startswith("BSSY") if (at := _target(one)) in index}
    found: list[set[int]] = []
    for number, one in enumerate(code):
        ways, kind = set[int](), one.name.partition(".")[0]
        conditional = one.predicated or (kind == "BRA" and "," in one.operands)
        if conditional or kind not in ("BRA", "EXIT", "RET"):
            ways.add(number + 1)
        if kind in ("BRA", "CALL") and (at := _target(one)) in index:
            ways.add(index[at])
        if kind == "RET":
            ways |= returns
        if kind in ("BSYNC", "BREAK"):
            ways |= meets
        found.append({way for way in ways if way < len(code)})
    return found


def _target(one: _Instruction) -> int:
    found = _TARGET.search(one.operands)
    return int(found[1], 16) if found is not None else -1
