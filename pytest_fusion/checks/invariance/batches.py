"""How many slices the further calls of a case have: sizes near those at which launchers choose between kernels.

The case alone decides, so that a replay makes the same calls. Elements, work and interpreted seconds bound the cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pytest_fusion.case import counter_random
from pytest_fusion.case.make import ImpossibleCase
from pytest_fusion.case.plan import cost, refit
from pytest_fusion.checks.invariance.case_slices import resized
from pytest_fusion.checks.multiprocessors import MANY
from pytest_fusion.checks.trial import Trial
from pytest_fusion.interpreter.launch import Launch
from pytest_fusion.spec.dtypes import NARROW

NAME = "invariance"


# Where launchers choose (GEMV or GEMM, splits, rows a tile): powers of two. A case takes each or a neighbour, below 64
# both sides, as few slices show little. The number of multiprocessors (132 of an H100 without a GPU) decides splits and
# persistent grids.
_POWERS = tuple(2**k for k in range(3, 13))
_BOTH_SIDES, _NEIGHBOURS = 64, (0, 1, -1)
# The reference has no lanes at these sizes, so they may exceed a case's: 257 rows of 4097, as other splits or tiles
# show in long rows, and a quarter of that in larger batches.
_ELEMENTS, _ELEMENTS_OF_MANY, _WORK, _FEW = 257 * 4097, 257 * 1025, 1 << 24, 257
# 4097 programs of a short row take 30 ms in batches; kernels that need them one by one are refused long before.
_PROGRAMS = 5000
# A kernel's own sizes: blocks that are no power of two, and grids that stop growing with the batch.
_MOST_LEARNT, _LEAST_LEARNT = 4, 3
# Interpreted kernels: after a call of 0.4 s none with more slices (the next has up to four times as many, within a
# case's limit even for quadratic work); after 1.2 s in a test only few slices, and no wider ones.
_SLOW_S, _TEST_S = 0.4, 1.2


@dataclass(slots=True)
class Spent:
    """How many cases ran, how many for their width alone, and the widest slice; 16 bits (True) and 32 bits apart.

    Another order of a root mean square shows in one float32 row in ten; 16 bits round it away. ``found``: further cases
    shrink a finding that showed ``at`` two sizes. ``seconds``: the lesser of wall and CPU time.
    """

    cases: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    wide: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    widest: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    found: bool = False
    at: tuple[int, int] = (2, 2)
    seconds: float = 0.0


@dataclass(slots=True)
class InvarianceState:
    """Separate states for outputs and gradients."""

    outputs: Spent = field(default_factory=Spent)
    gradients: Spent = field(default_factory=Spent)


@dataclass(frozen=True, slots=True)
class Effort:
    """How many cases run: of any kind, of thorough ones, and extra ones for slices twice as wide.

    Most sums of the first cases are too short to be split; the batch's influence shows in long ones.
    """

    any_case: int
    thorough: int
    wide: int
    calls: int

    def _most(self, trial: Trial) -> int:
        return self.thorough if trial.thorough else self.any_case

    def due(self, so_far: Spent, trial: Trial, width: int) -> bool:
        """Whether the case is one of them; always while a finding shrinks."""
        narrow, spent = _narrow(trial), _spent(trial)
        most = self._most(trial)
        if so_far.found or so_far.cases[narrow] < (most - so_far.cases[not narrow] if spent else most):
            return True
        # At least one: the first cases, of short slices, may have used up the seconds.
        return so_far.wide[narrow] < (1 if spent else self.wide) and width >= 2 * so_far.widest[narrow]

    def note(self, so_far: Spent, trial: Trial, width: int) -> bool:
        """Count a case that runs; True if it runs for its width."""
        narrow = _narrow(trial)
        counts = so_far.cases if so_far.cases[narrow] < self._most(trial) else so_far.wide
        counts[narrow] += 1
        so_far.widest[narrow] = max(so_far.widest[narrow], width)
        return counts is so_far.wide


def _narrow(trial: Trial) -> bool:
    return trial.result.case.dtype in NARROW


def width(trial: Trial, dim: str) -> int:
    """The work of one slice of the dim: the product of all other sizes."""
    return cost(trial.spec, resized(trial.result.case, dim, 1))[1]


def _spent(trial: Trial) -> bool:
    """Whether interpreted calls have used up a test's seconds."""
    state = trial.context.state(InvarianceState)
    return trial.context.device.type == "cpu" and state.outputs.seconds + state.gradients.seconds > _TEST_S


class Batches:
    """The sizes for one dim of one case."""

    def __init__(self, trial: Trial, dim: str, so_far: Spent) -> None:
        self._trial, self._dim, self._case, self._so_far = trial, dim, trial.result.case, so_far
        size = self._case.sizes[dim]
        assert isinstance(size, int)
        self._size = size
        self.programs = max(trial.context.programs, _PROGRAMS)
        self._interpreted = trial.context.device.type == "cpu"
        self._most: int | None = None
        # All sizes run where a finding shrinks, or there is no other case.
        if _spent(trial) and not (so_far.found or trial.context.complete):
            self._most = _FEW

    def fits(self, size: int) -> bool:
        """Whether the spec and the limits of a call allow the size beside the case's others."""
        spec, other = self._trial.spec, resized(self._case, self._dim, size)
        try:
            if refit(spec, other.sizes) != other.sizes:
                return False
            elements, work = cost(spec, other)
        except ImpossibleCase:
            return False
        allowed = _ELEMENTS if size <= _FEW else _ELEMENTS_OF_MANY
        return size <= self._size or (elements <= allowed and work <= _WORK)

    def admits(self, size: int) -> bool:
        """Whether a call of so many slices should end soon."""
        return self._most is None or size <= max(self._most, self._size)

    def took(self, size: int, seconds: float) -> None:
        """Note the seconds of a call of so many slices."""
        if self._interpreted and seconds > _SLOW_S:
            self._most = min(size, size if self._most is None else self._most)

    def chosen(self, count: int) -> list[int]:
        """Up to ``count`` sizes except 1 and the case's own, ascending, so that a threshold is met from just above."""
        seed, dim, usable = self._case.seed, self._dim, self._usable()
        every = sorted({size for group in usable for size in group})
        if self._trial.context.complete:
            return every
        if self._so_far.found:
            least, most = self._so_far.at
            sides = [*[size for size in every if size <= least][-1:], *[size for size in every if size >= most][:1]]
            return list(dict.fromkeys(sides)) or every[:1]
        drawn = [
            (counter_random.mix(seed, NAME, dim, "turn", i), group[counter_random.mix(seed, NAME, dim, i) % len(group)])
            for i, group in enumerate(usable)
            if group
        ]
        return sorted(list(dict.fromkeys([*every[-1:], *(size for _, size in sorted(drawn))]))[:count])

    def _usable(self) -> list[list[int]]:
        """The sizes that fit, in groups around those at which launchers choose."""
        device, cores = self._trial.context.device, MANY
        if device.type == "cuda":
            cores = torch.cuda.get_device_properties(device).multi_processor_count
        groups = [[2], *([around + by for by in _NEIGHBOURS] for around in (*_POWERS, cores))]
        groups += [[power - 1] for power in _POWERS if power <= _BOTH_SIDES]
        return [[size for size in group if size != self._size and self.fits(size)] for group in groups]

    def learnt(self, launches: Mapping[int, Sequence[Launch]]) -> list[int]:
        """Sizes where this kernel may change: constants not a power of two, and grids that two sizes share."""
        constants: set[int] = set()
        grids: dict[int, set[int]] = {}
        for size, each in launches.items():
            for launch in each:
                constants |= {value for value in launch.constexprs.values() if type(value) is int}
                grids.setdefault(launch.programs, set()).add(size)
        own = {value for value in constants if value & (value - 1)}
        own |= {programs for programs, sizes in grids.items() if len(sizes) > 1 and programs < max(sizes)}
        around = sorted(value + by for value in own if _LEAST_LEARNT <= value <= _POWERS[-1] for by in (0, 1))
        new = [size for size in dict.fromkeys(around) if size not in launches and size != self._size]
        return [size for size in new if self.fits(size) and self.admits(size)][:_MOST_LEARNT]
