"""Codes become numbers: two at a time, in the register that they share, by instructions named here."""

from __future__ import annotations

import triton.language as tl

from reference_kernels._common import INTERPRETED, jit

# The interpreter knows no instructions by name.
_ASM = tl.constexpr(not INTERPRETED)


@jit
def four_bits(words: tl.tensor, PLACE: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """The codes, -8 to 7, in bits ``PLACE`` to ``PLACE + 3`` of int16 ``words``.

    A code becomes a number without a conversion, of which a multiprocessor does few: as the low bits of 128 in
    bfloat16, of 1024 in float16, less 136 or 1032, which is exact. Two codes, in one register, take a shift, a mask
    that sets the exponents too, and a difference.
    """
    if not _ASM:
        numbers = (((words >> PLACE) & 15) - 8).to(dtype)
    elif dtype == tl.bfloat16:
        numbers = tl.inline_asm_elementwise(
            "{ .reg .b32 two, exponents, one, middle;"
            "mov.b32 exponents, 0x43004300; mov.b32 one, 0x3F803F80; mov.b32 middle, 0xC308C308;"
            f"shr.b32 two, $1, {PLACE}; lop3.b32 two, two, 0x000F000F, exponents, 0xEA;"
            "fma.rn.bf16x2 $0, two, one, middle; }",
            "=r,r",
            [words],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        numbers = tl.inline_asm_elementwise(
            "{ .reg .b32 two, exponents, middle; mov.b32 exponents, 0x64006400; mov.b32 middle, 0x64086408;"
            f"shr.b32 two, $1, {PLACE}; lop3.b32 two, two, 0x000F000F, exponents, 0xEA;"
            "sub.rn.f16x2 $0, two, middle; }",
            "=r,r",
            [words],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    return numbers


@jit
def four_bits_in_order(words: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """The codes of int16 ``words``, the lowest bits of all of a row first: a group's columns in their order."""
    low = tl.join(four_bits(words, 0, dtype), four_bits(words, 4, dtype))
    high = tl.join(four_bits(words, 8, dtype), four_bits(words, 12, dtype))
    four = tl.permute(tl.join(low, high), (0, 3, 2, 1))
    return tl.reshape(four, (words.shape[0], 4 * words.shape[1]))


@jit
def eight_bits(words: tl.tensor, PLACE: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """The signed bytes in bits ``PLACE`` to ``PLACE + 7`` of int16 ``words``, as `four_bits`; in bfloat16, which has
    seven bits beside the exponent, as 128 with the lower seven, less 128 or, for the eighth, 256."""
    if not _ASM:
        numbers = ((((words >> PLACE) & 255) ^ 128) - 128).to(dtype)
    elif dtype == tl.bfloat16:
        numbers = tl.inline_asm_elementwise(
            "{ .reg .b32 two, exponents, less, low, high; mov.b32 exponents, 0x43004300; mov.b32 less, 0xBF80BF80;"
            f"shr.b32 two, $1, {PLACE}; lop3.b32 low, two, 0x007F007F, exponents, 0xEA;"
            "lop3.b32 high, two, 0x00800080, exponents, 0xEA; fma.rn.bf16x2 $0, high, less, low; }",
            "=r,r",
            [words],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        numbers = tl.inline_asm_elementwise(
            "{ .reg .b32 two, middle; mov.b32 middle, 0x64806480;"
            f"shr.b32 two, $1, {PLACE}; lop3.b32 two, two, 0x00FF00FF, middle, 0x6A; sub.rn.f16x2 $0, two, middle; }}",
            "=r,r",
            [words],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    return numbers


@jit
def settled(total: tl.tensor) -> tl.tensor:
    """``total`` as it is, when its products are done: by an instruction that is none.

    Triton leaves a sum's last product running into the next step, whose codes then wait for it to free its registers:
    ptxas puts a wait behind each of its instructions. Waited for at the end of the step, products of a step overlap
    with the codes of the next ones.
    """
    if _ASM:
        total = tl.inline_asm_elementwise("", "=f,0", [total], dtype=tl.float32, is_pure=True, pack=1)
    return total
