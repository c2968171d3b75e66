"""One planted bug: what it is, what must find it, what a knowledgeable person would call it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from pytest_fusion import FusionSpec

# 0, 1 and the powers of two with their neighbours: where kernels change their ways.
BOUNDARIES: tuple[int, ...] = tuple(sorted({0, 1, 2, 3} | {2**p + d for p in range(2, 18) for d in (-1, 0, 1)}))

VALUES = frozenset({"values"})
# A read beside the tensor shows as what it drags in, or as a result that depends on it.
READS = VALUES | {"bounds"}
# A write beside the tensor may hit a guard, another row, or the process.
WRITES = READS | {"crash", "unwritten", "inputs", "repeat"}
HOLES = VALUES | {"unwritten", "repeat"}  # whoever stores to the wrong place may store where another one does
RAISES = frozenset({"error"})
GRADIENTS = frozenset({"gradients"})
# The accesses of a backward are seen at its lines before its gradients are compared.
BACKWARD_READS = GRADIENTS | {"bounds"}
BACKWARD_WRITES = BACKWARD_READS | {"crash", "unwritten", "inputs", "repeat"}


@dataclass(frozen=True, slots=True)
class Plant:
    """One planted bug.

    ``expect_checks`` are the checks whose verdict would be right; ``causes`` the slugs that somebody who knows the
    bug would call right; ``smallest`` the sizes of the smallest inputs that can show the bug, several where no one of
    them is the smallest, none where size does not matter. A bug of one rounding too many shows in a statistic: its
    smallest size is the one at which about half of the draws of its best dtype and regime show it. ``needs`` is
    ``"cuda"`` or ``"two GPUs"`` where nothing shows without, ``profile`` the one that draws what shows it. ``slow``
    leaves it out of the default test run, because another plant is found in the same way.
    """

    name: str
    bug_class: str
    row: int | None
    make_spec: Callable[[], FusionSpec]
    expect_checks: frozenset[str]
    causes: frozenset[str]
    smallest: tuple[Mapping[str, int], ...]
    needs: str = ""
    profile: str = "dev"
    slow: bool = False

    def allowed(self) -> tuple[Mapping[str, int], ...]:
        """Per smallest input the largest sizes that count as shrunk: the next boundary above each."""
        return tuple({name: next_boundary(size) for name, size in sizes.items()} for sizes in self.smallest)

    def is_shrunk(self, dims: Mapping[str, int]) -> bool:
        return not self.smallest or any(
            all(dims.get(name, 0) <= most for name, most in limits.items()) for limits in self.allowed()
        )


def next_boundary(size: int) -> int:
    """The smallest boundary above ``size``."""
    return BOUNDARIES[bisect_right(BOUNDARIES, size)]


Row = tuple[str, str, int | None, frozenset[str], str, list[tuple[int, ...]]]


def group(
    prefix: str,
    make: Callable[..., FusionSpec],
    dims: str,
    rows: list[Row],
    *,
    needs: str = "",
    profile: str = "dev",
    slow: str = "",
    **fixed: object,
) -> list[Plant]:
    """Plants of one kernel: each row is (bug, class, report, checks, causes, smallest sizes in the order of ``dims``).

    ``slow`` names those that the default test run leaves out; ``fixed`` goes to ``make`` after the bug.
    """
    names = dims.split()
    return [
        Plant(
            f"{prefix}/{bug}", bug_class, report, partial(make, bug, **fixed), checks, frozenset(causes.split()),
            tuple(dict(zip(names, size, strict=True)) for size in sizes),
            needs=needs, profile=profile, slow=bug in slow.split(),
        )
        for bug, bug_class, report, checks, causes, sizes in rows
    ]  # fmt: skip
