"""Registers that a listing of SASS reads unwritten: on every way, on some way, and where ways are not known."""

from __future__ import annotations

import pytest

from pytest_fusion.run.measure.resources.unset import unset

HEAD = "\t\tFunction : kernel\n"


def listing(*instructions: str) -> str:
    """Instructions at 0x0000, 0x0010, ..., each with the line of its encoding, as cuobjdump prints them."""
    code = "".join(
        f"        /*{16 * number:04x}*/  {one} ;   /* 0x0 */\n   /* 0x0 */\n" for number, one in enumerate(instructions)
    )
    return HEAD + code


def test_what_no_way_writes_is_named() -> None:
    """With the instruction that reads it and its address."""
    found = unset(listing("ULDC UR5, c[0x0][0x28]", "UIADD3 UR22, UP0, UR22, 0x40, URZ", "EXIT"))
    assert found == "UR22, which nothing wrote before (UIADD3 UR22, UP0, UR22, 0x40, URZ at 0x10)"


def test_a_write_that_comes_later_is_none() -> None:
    """Unless a loop comes back from there."""
    straight = ("UIADD3 UR4, UR6, 0x1, URZ", "UMOV UR6, 0x2", "EXIT")
    assert unset(listing(*straight)).startswith("UR6")
    assert unset(listing(*straight[:2], "@P0 BRA 0x0", "EXIT")) == ""


@pytest.mark.parametrize(
    "code",
    [
        ("@P0 UMOV UR6, 0x1", "UIADD3 UR4, UR6, 0x1, URZ"),  # written on some way
        ("@!P0 BRA 0x20", "UMOV UR6, 0x1", "USHF.L.U32 UR4, UR6, 0x1, URZ"),
        ("BRA 0x30", "USHF.L.U32 UR4, UR6, 0x1, URZ", "EXIT", "UMOV UR6, 0x1", "BRA 0x10"),  # blocks out of order
        ("ULDC.64 UR6, c[0x0][0x28]", "UIADD3 UR4, UR7, 0x1, URZ"),  # a pair
        ("UIMAD.WIDE UR6, URZ, 0x2, URZ", "UIADD3 UR4, UR6, UR7, URZ"),
        ("LDCU.128 UR4, c[0x0][0x28]", "UIADD3 UR4, UR7, 0x1, URZ"),  # four, or what nobody has heard of
        ("REDUX.SUM.S32 UR6, R7", "UIADD3 UR4, UR6, 0x1, URZ"),
        ("ULOP3.LUT UP0, UR6, UR7, 0x1, URZ, 0xc0, !UPT", "UIADD3 UR4, UR6, 0x1, URZ"),  # behind a predicate
        ("R2UR UR6, R7", "ULEA UR4, UR6, UR6, 0x4"),
        ("UPRMT UR4, UR6, 0x7610, UR6", "UMOV UR8, UR6"),  # moved on, which computes nothing
        ("CALL.REL.NOINC 0x30", "UIADD3 UR4, UR6, 0x1, URZ", "EXIT", "UMOV UR6, 0x1", "RET.REL.NODEC R4 0x0"),
        ("BSSY B0, 0x30", "BSYNC B0", "EXIT", "UMOV UR6, 0x1", "UIADD3 UR4, UR6, 0x1, URZ"),
        ("UIADD3 UR4, URZ, 0x1, URZ", "IMAD.U32 R3, RZ, RZ, UR9"),  # no uniform arithmetic
    ],
    ids=str,
)
def test_honest_code(code: tuple[str, ...]) -> None:
    """Some way writes the register before, or nothing is computed with it."""
    assert unset(listing(*code, "EXIT")) == ""


def test_nothing_is_said_where_control_goes_by_a_register() -> None:
    """Nor of several functions in one binary."""
    wrong = ("UIADD3 UR4, UR6, 0x1, URZ", "EXIT")
    assert unset(listing(*wrong)) != ""
    assert unset(listing("BRX R2 -0x10", *wrong)) == ""
    assert unset(listing(*wrong) + listing(*wrong)) == ""
    assert unset("") == ""
