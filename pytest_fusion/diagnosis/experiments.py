"""Experiments on the smallest case that tell causes apart: change one thing, run the kernel again, see."""

from __future__ import annotations

from collections.abc import Callable

from pytest_fusion.case.make import ImpossibleCase
from pytest_fusion.case.model import Case
from pytest_fusion.case.plan import Plan, refit


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 1).bit_length()


def is_tail_mask(plan: Plan, case: Case, blocks: tuple[int, ...], fails: Callable[[Case], bool]) -> bool:
    """Whether some dim is right at whole tiles and wrong one past them: the last, partial tile is mishandled.

    Tiles are the learned block sizes or, where a kernel pads a row to one tile, powers of two. Each answer must be the
    same for three seeds, since a bug of values passes or fails by chance too. Costs at most nine runs a dim and tile.
    """

    def always(candidates: list[Case | None], failing: bool) -> bool:
        known = [c for c in candidates if c is not None]
        return len(known) == len(candidates) and all(
            fails(c.with_(seed=seed)) is failing for c in known for seed in (0, 1, 2)
        )

    for name, size in case.sizes.items():
        if not isinstance(size, int) or size == 0:
            continue
        for tile in dict.fromkeys((*blocks, _power_of_two(size))):
            past = [_resized(plan, case, name, tile + 1)]
            whole = [_resized(plan, case, name, count * tile) for count in (1, 2)]
            if always(past, True) and always(whole, False):
                return True
    return False


def _resized(plan: Plan, case: Case, name: str, size: int) -> Case | None:
    """The case with one size changed, or ``None`` where bounds forbid it."""
    try:
        fitted = refit(plan.spec, {**case.sizes, name: size})
    except ImpossibleCase:
        return None
    return case.with_(sizes=fitted) if fitted[name] == size else None
