"""The part of check `repeat` that needs more calls: the same inputs again while everything else changes.

Every case is called twice, under two fills, so a test compares hundreds of pairs of calls, which shows chance. A few
cases show what needs more calls or other circumstances: state that a third or tenth call meets; other addresses and
dirty fresh memory; other work on the device; programs in another order (chosen on the CPU lane; few at a time on a GPU,
which promises no order); and calls of other sizes in between.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from pytest_fusion.case import counter_random
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.case.plan import Limits, cost, refit
from pytest_fusion.checks import memory
from pytest_fusion.checks.context import call, call_placed, error_verdict, rejection
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, failed, passed, unknown
from pytest_fusion.interpreter import installed
from pytest_fusion.interpreter.control.executor import Order, ordered
from pytest_fusion.run.fused import Outcome
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.memory.backing import ALIGNMENT, CPU_GUARD_BYTES, DEVICE_GUARD_BYTES, Backing
from pytest_fusion.run.placing import Placed, place
from pytest_fusion.run.stress.competing_kernels import competing, crowded

NAME = "repeat"

# A nearly full GPU runs fewer programs than this at once, of 128 threads. A case takes 15 ms there; in two of three, a
# program that wrongly took itself for the last one showed.
_MOST_AT_ONCE, _CROWDED_CASES = 12, 8
_CROWDED = "few at a time, on a device that is full"
# Unchanged calls that separate effects of an order or of other sizes from chance: an output that alternates passes for
# an effect in few cases in a thousand.
_SURE = 6


@dataclass(slots=True)
class _State:
    """How many cases had all calls, and how many ran in other orders; once something is ``found``, cases shrink it."""

    cases: int = 0
    ordered: int = 0
    found: bool = False


@dataclass(frozen=True, slots=True)
class _Effort:
    """How many cases run, the calls of each (both fills' first calls included), and the orders."""

    cases: int
    calls: int
    orders: tuple[Order, ...]


# Five calls, at 10 ms each, show what every second to fourth call does; a longer period needs the nightly run.
_USUAL = _Effort(cases=3, calls=5, orders=("reversed",))
_DEEP = _Effort(cases=40, calls=20, orders=("reversed", 1, 2))


def due(trial: Trial) -> bool:
    """A few thorough cases; every case while a finding shrinks."""
    return _in_full(trial) or _ordered(trial)


def _in_full(trial: Trial) -> bool:
    """Whether this case has all calls."""
    context, state = trial.context, trial.context.state(_State)
    return state.found or context.complete or (trial.thorough and state.cases < _effort(trial).cases)


def _ordered(trial: Trial) -> bool:
    """Whether programs may change places here, in one more call, and did in few cases yet."""
    # The first cases are small: those of a compaction by blocks of 64 had 5, 40 and 63 elements, and a bug in places
    # that programs take by an atomic passed.
    cases = _effort(trial).cases if trial.context.device.type == "cpu" else max(_effort(trial).cases, _CROWDED_CASES)
    return trial.context.state(_State).ordered < cases and _may_be_ordered(trial) and _several(trial)


def _several(trial: Trial) -> bool:
    least = 1 if trial.context.device.type == "cpu" else _MOST_AT_ONCE
    return any(math.prod(launch.grid) > least for launch in trial.result.launches)


def _may_be_ordered(trial: Trial) -> bool:
    """Whether Triton launches are interpreted, or an NVIDIA GPU may give them little room."""
    little_room = trial.context.device.type == "cuda" and torch.version.hip is None
    return bool(trial.result.launches) and (little_room or (trial.context.device.type == "cpu" and installed()))


def _effort(trial: Trial) -> _Effort:
    return _DEEP if trial.context.deep else _USUAL


def run(trial: Trial) -> Verdict:
    """Make more calls of the case; the first thing that varies."""
    again = _Again(trial)
    try:
        if _in_full(trial):
            trial.context.state(_State).cases += 1
            verdict = again.under_pressure() or again.in_other_orders() or again.between_other_sizes()
        else:
            verdict = again.in_other_orders()
    except _Ended as ended:
        (verdict,) = ended.args
    if verdict is not None and verdict.failed:
        trial.context.state(_State).found = True
    return verdict or passed(NAME, runs=again.calls, orders=again.orders, sizes=again.sizes)


class _Ended(Exception):
    """A repeated call did something else than return other bits; the argument is the verdict."""


@dataclass(slots=True)
class _Again:
    """Further calls of one case, compared with its first."""

    trial: Trial
    calls: int = 2
    orders: list[str] = field(default_factory=list)
    sizes: list[Mapping[str, object]] = field(default_factory=list)
    base: dict[str, torch.Tensor] = field(init=False)
    _decoys: Decoys = field(init=False)

    def __post_init__(self) -> None:
        trial = self.trial
        tensors = trial.judged or {n: t.detach().clone() for n, t in trial.got.tensors.items()}
        self.base, sizes = trial.steady(tensors), [t.nbytes for t in tensors.values()]
        self._decoys = Decoys(trial.context.device, sizes, seed=trial.result.case.seed)

    def under_pressure(self) -> Verdict | None:
        """Call with other addresses, dirty memory and, every other time, a busy device."""
        count = _effort(self.trial).calls - 2
        runs = [self._call(turn) for turn in range(count)]
        varied = repeat.variations(self.base, runs)
        if not varied:
            return None
        later = len(runs) > 1 and not repeat.variations(runs[0], runs[1:])
        later = later and all(repeat.first_difference(self.base, run) is not None for run in runs)
        if later and not repeat.variations(runs[0], self._plain()):
            return repeat.varies(varied, repeat.FIRST, runs=count + 2)
        return repeat.check_repeat(varied, count + 2)

    def in_other_orders(self) -> Verdict | None:
        """Call with programs and lanes in another order, where this process chooses it; on a GPU few at a time."""
        trial = self.trial
        if not _may_be_ordered(trial):
            return None
        trial.context.state(_State).ordered += _several(trial)
        for order in _effort(trial).orders if trial.context.device.type == "cpu" else (None,):
            got = self._in_order(order)
            if got is None:
                continue
            self.orders.append("crowded" if order is None else str(order))
            varied = repeat.variations(self.base, [got])
            if not varied:
                continue
            plain = self._plain()
            if repeat.variations(self.base, plain):
                return repeat.check_repeat(repeat.variations(self.base, [got, *plain]), self.calls)
            return repeat.varies(
                varied,
                f"when the programs of a launch, or the lanes of one, run in another order ({_named(order)}), which a "
                f"GPU chooses as it likes: {repeat.ORDERED}",
                order=self.orders[-1],
            )
        return None

    def between_other_sizes(self) -> Verdict | None:
        """Call again after calls of smaller and larger inputs, which leave workspaces and caches behind."""
        others = list(_others(self.trial))
        if not others or (changed := self._after(others)) is None:
            return None
        self.sizes = [dict(case.sizes) for case, _ in others]
        varied = repeat.variations(self.base, [changed])
        if not varied:
            return None
        plain = self._plain()
        stays = bool(repeat.variations(self.base, plain[:1])) and not repeat.variations(plain[0], plain[1:])
        if not (stays or (not repeat.variations(self.base, plain) and all(self._changes(others) for _ in range(2)))):
            return repeat.check_repeat(repeat.variations(self.base, [changed, *plain]), self.calls)
        between = " and ".join(", ".join(f"{dim}={size}" for dim, size in case.sizes.items()) for case, _ in others)
        worst = varied[0]
        return failed(
            NAME,
            f"{worst} differ after calls of other sizes ({between}), the first at {worst.first}: something kept "
            "between calls, a workspace or a cache, is not made ready for this size",
            identity="repeat:sizes",
            cause="stale-memory",
            output=worst.output,
            count=worst.count,
            total=worst.total,
            first=worst.first,
            others=self.sizes,
        )

    def _call(self, turn: int) -> dict[str, torch.Tensor]:
        """One more unchanged call, at other addresses. Raises ``_Ended``."""
        trial, context = self.trial, self.trial.context
        self._decoys.shuffle()
        usual = CPU_GUARD_BYTES if context.device.type == "cpu" else DEVICE_GUARD_BYTES
        with context.clock.phase("make"):
            # An odd number of alignments further than usual, so at no multiple of 512 bytes.
            guard = usual + (1 + 2 * (turn % 4)) * ALIGNMENT
            placed = place(trial.logical, trial.result.case, context.device, FILLS[turn % len(FILLS)], guard)
        with competing(context.device) if turn % 2 else nullcontext():
            outcome = call_placed(context, context.spec.fused, placed)
        if outcome.error is not None:
            if rejection(trial.spec, outcome.error) is not None:
                refused = type(outcome.error).__name__
                raise _Ended(unknown(NAME, f"a repeated call was refused ({refused}) though the first was not"))
            trial.result.trace = outcome.trace
            raise _Ended(error_verdict(outcome))
        for found in (memory.check_access(outcome, trial.spec), memory.check_damage(outcome.damage)):
            if found is not None and found.failed and context.on(found.check):
                raise _Ended(found)
        assert outcome.watch is not None
        sizes = [*placed.arena.sizes(), *outcome.watch.sizes()]
        if self.calls == 2:
            self._decoys = Decoys(context.device, sizes, seed=trial.result.case.seed)
        self.calls += 1
        return self._returned(outcome, placed, "called again on the same inputs")

    def _in_order(self, order: Order | None) -> dict[str, torch.Tensor] | None:
        """The outputs; ``None`` where programs wait for each other in the order of the launch."""
        trial = self.trial
        with crowded(trial.context.device) if order is None else ordered(order):
            outcome, placed = call(trial.context, trial.result.case, trial.logical, FILLS[0])
        if outcome.error is not None:
            return None
        return self._returned(outcome, placed, f"with the programs of a launch in another order ({_named(order)})")

    def _returned(self, outcome: Outcome, placed: Placed, when: str) -> dict[str, torch.Tensor]:
        """Copies of the outputs that may not vary. Raises ``_Ended`` where one that may vary is wrong."""
        tensors = self.trial.collect(outcome, placed).tensors
        wrong = self.trial.judge_varying(tensors)
        if wrong.failed:
            raise _Ended(repeat.varies_wrongly(wrong, when))
        return {name: t.detach().clone() for name, t in self.trial.steady(tensors).items()}

    def _plain(self) -> list[dict[str, torch.Tensor]]:
        return [self._call(turn) for turn in range(_SURE)]

    def _changes(self, others: list[tuple[Case, Mapping[str, object]]]) -> bool:
        got = self._after(others)
        return got is not None and bool(repeat.variations(self.base, [got]))

    def _after(self, others: list[tuple[Case, Mapping[str, object]]]) -> dict[str, torch.Tensor] | None:
        """The case's outputs after calls of the others; ``None`` where all of those were refused."""
        accepted = 0
        for case, logical in others:
            outcome, _ = call(self.trial.context, case, logical, FILLS[0])
            accepted += outcome.error is None
        return self._call(0) if accepted else None


def _others(trial: Trial) -> Iterator[tuple[Case, Mapping[str, object]]]:
    """The case with all sizes halved, and with all doubled plus one, as far as bounds and cost allow."""
    case, spec = trial.result.case, trial.spec
    for smaller in (True, False):
        sizes = {
            name: tuple(_other(s, smaller=smaller) for s in size)
            if isinstance(size, tuple)
            else _other(size, smaller=smaller)
            for name, size in case.sizes.items()
        }
        try:
            other = case.with_(sizes=refit(spec, sizes), seed=counter_random.mix(case.seed, "repetition", smaller) >> 1)
            elements, work = cost(spec, other)
            if other.sizes == case.sizes or elements > Limits().elements or work > Limits().work:
                continue
            yield other, make_inputs(spec, other, trial.context.device)
        except (ImpossibleCase, InputFailed):
            continue


def _other(size: int, *, smaller: bool) -> int:
    return (size + 1) // 2 if smaller else 2 * size + 1


def _named(order: Order | None) -> str:
    """The order in words; ``None`` is that of a nearly full GPU."""
    if order is None:
        return _CROWDED
    return "the last one first" if order == "reversed" else f"shuffled by seed {order}"


# The most bytes of decoys; the profile bounds a case's own tensors.
_MOST_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
# Returning cached memory to the driver costs milliseconds and a synchronisation, so it is rare.
_EMPTY_EVERY = 5


class Decoys:
    """Blocks of the sizes that a call allocated, on ``device``.

    Allocators return the last freed block first: without decoys, all calls get the same addresses and find in fresh
    memory what the last call left, often the right answer.
    """

    def __init__(self, device: torch.device, sizes: Sequence[int], seed: int) -> None:
        self._device = device
        self._random = random.Random(seed)
        self._held: list[object] = []
        self._rounds = 0
        room = _MOST_BYTES.get(device.type, 64 << 20)
        self._sizes: list[int] = []
        for size in sorted(sizes):
            room -= 2 * size
            if size and room >= 0:
                self._sizes.append(size)

    def shuffle(self) -> None:
        """Take and dirty blocks of every size, fewer if memory is short; free about half and keep the others."""
        before, self._held = self._held, []
        self._rounds += 1
        taken: list[object] = []
        try:
            for size in self._sizes:
                taken += [self._block(size), self._block(size)]
        except (MemoryError, RuntimeError):  # torch's OutOfMemoryError is a RuntimeError
            taken.clear()
        before.clear()
        self._random.shuffle(taken)
        self._held = taken[: (len(taken) + 1) // 2]
        del taken
        if self._device.type == "cuda" and self._rounds % _EMPTY_EVERY == 0:
            torch.cuda.empty_cache()

    def _block(self, size: int) -> object:
        # Other bytes each time: fresh memory that reaches a result must not look the same twice.
        dirt = torch.empty(size, dtype=torch.uint8, device=self._device).fill_(self._random.randrange(256))
        # Guarded memory is mapped, not allocated: an untouched mapping takes its address but no memory.
        return (dirt, Backing(size, self._device)) if self._device.type == "cpu" else dirt
