"""Values that callers pass and independent draws never make: runs, certainties, round numbers, for some seeds."""

from __future__ import annotations

import math

import torch

from pytest_fusion.case import counter_random


def rows_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with one element for each row of a tensor of at least one dimension."""
    return (*shape[:-1], 1)


def runs(shape: tuple[int, ...], seed: int, device: torch.device, most: int) -> torch.Tensor:
    """A mask with one run of at most ``most`` elements in each row; in one tensor of three all rows have the same.

    Half of the runs have the full length. Half begin with the row; half of the others end with it.
    """
    rows = rows_of(shape) if counter_random.mix(seed, "shared") % 3 else (1,) * len(shape)
    share, side, place = (
        counter_random.uniform(rows, counter_random.mix(seed, "run", salt), device) for salt in range(3)
    )
    length = (share * 2 * (most + 1)).floor().clamp(max=most)
    room = shape[-1] - length
    start = torch.where(side < 0.5, 0.0, torch.where(side < 0.75, room, (place * (room + 1)).floor()))
    column = torch.arange(shape[-1], device=device)
    return ((column >= start) & (column < start + length)).expand(shape)


def booleans(shape: tuple[int, ...], share: float, seed: int, device: torch.device) -> torch.Tensor:
    """True with probability ``share``; in every other tensor a run of up to half of each row has one value."""
    # Rows padded on the left begin so, and their first tile is masked out. Longer runs would mask out whole rows.
    found = counter_random.uniform(shape, seed, device) < share
    if not shape or counter_random.mix(seed, "runs") % 2:
        return found
    value = counter_random.uniform(rows_of(shape), counter_random.mix(seed, "value"), device) < share
    return torch.where(runs(shape, seed, device, (shape[-1] + 1) // 2), value, found)


def flags(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """Half are true, some in runs; in every other tensor some rows have one value, as if a sequence is masked."""
    # Of 128 elements drawn alone, that never happens.
    found = booleans(shape, 0.5, seed, device)
    if not shape or counter_random.mix(seed, "whole rows") % 2:
        return found
    row = counter_random.uniform(rows_of(shape), counter_random.mix(seed, "rows"), device)
    return (found & (row > 0.15)) | (row > 0.9)


def probabilities(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device) -> torch.Tensor:
    """Rows that add up to one, float64; in every other tensor three rows of four are unlike a softmax.

    One is a label (a single 1); one has zeros, which have no logarithm; one has elements down to 2^-40, just below a
    clamp at 1e-12, or to 2^-12 in float16, where less is subnormal.
    """
    v = counter_random.uniform(shape, seed, device) + 2.0**-10
    if not shape or not shape[-1]:
        return v / v
    if not counter_random.mix(seed, "certain") % 2:
        width, rows = shape[-1], rows_of(shape)
        row = torch.arange(math.prod(rows), device=device).reshape(rows) + counter_random.mix(seed, "kind") % 4
        open_at = counter_random.uniform(rows, counter_random.mix(seed, "kept"), device).mul(width).long()
        rest = torch.arange(width, device=device) != open_at
        some = rest & (counter_random.uniform(shape, counter_random.mix(seed, "some"), device) < 0.5)
        least = torch.finfo(dtype).smallest_normal if dtype.is_floating_point else 0.5
        depth = min(40.0, -math.log2(least) - 2)
        # Whole exponents: exp2 of other numbers differs between devices in the last bit.
        small = torch.exp2(
            -counter_random.uniform(shape, counter_random.mix(seed, "small"), device).mul(depth + 1).floor()
        )
        v = torch.where((row % 4 == 1) & rest, 0.0, v)
        v = torch.where((row % 4 == 2) & some, 0.0, v)
        v = torch.where((row % 4 == 3) & some, v * small, v)
    return v / v.sum(-1, keepdim=True)


def rounded(v: torch.Tensor, low: float, high: float, seed: int) -> torch.Tensor:
    """``v``, float64; for one seed in four, half are replaced by the next power of two towards zero, if in bounds."""
    # Quotients by a power-of-two scale are half-way between two codes, the only place that shows how a kernel rounds.
    if counter_random.mix(seed, "round") % 4:
        return v
    shape = tuple(v.shape)
    mantissa = torch.frexp(v).mantissa.abs()
    power = torch.where(v == 0, v, v / (2 * mantissa))
    chosen = counter_random.uniform(shape, counter_random.mix(seed, "rounded"), v.device) < 0.5
    return torch.where(chosen & (power >= low) & (power < high), power, v)


def ended(v: torch.Tensor, low: int, high: int, seed: int) -> torch.Tensor:
    """``v``, int64; for every other seed one element is ``high`` and another one, if there is one, ``low``."""
    # A length equal to its dim is one in 300 if drawn from 0 to 300. For every fourth seed half of all elements are
    # ends: a sum of three bytes wraps where all are 255, once in 2^24 random sums.
    low, high = counter_random.wrapped(low), counter_random.wrapped(high)
    if counter_random.mix(seed, "ended") % 2 or not v.numel():
        return v
    if counter_random.mix(seed, "corners") % 2:
        which = counter_random.uniform(tuple(v.shape), counter_random.mix(seed, "which"), v.device)
        v = torch.where(which < 0.25, low, torch.where(which < 0.5, high, v))
    flat = v.reshape(-1)
    count = flat.numel()
    at = counter_random.mix(seed, "high") % count
    flat[at] = high
    if count > 1:
        flat[(at + 1 + counter_random.mix(seed, "low") % (count - 1)) % count] = low
    return flat.reshape(v.shape)
