"""Samples of several calls in turn: each a CUDA graph over rotating cold inputs, beside a copy and a matrix product."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from benchmarks.suite.model import Call
from pytest_fusion.bench.on_device import COPIES
from pytest_fusion.case.containers import leaves, map_tensors
from pytest_fusion.run.measure.timing.graph_replay import COLD, Replayed, replayed, rotated

# A sample lasts so long, after an untimed run of the same calls.
SAMPLE_S = 2e-3
# Three calls of an operator of torch's take the host less than a millisecond, at 1.98 GHz some 2 ms are spun away.
_ONCE_CALLS, _ONCE_CYCLES = 3, 4_000_000
MOST_CALLS = 300
# Clocks rise within the first tenth of a second; then 10 samples at least, more until medians are known to 0.3 %.
WARM_S, FEWEST, MOST, PRECISE = 0.1, 10, 60, 0.003
_WARM_ROUNDS = 3
# 2 ms and 3 ms on an H200.
_COPIED, _COPIES, _SIDE, _PRODUCTS = 1 << 29, 8, 8192, 2
_TRIED = 5


class Sampled(Protocol):
    """Something that can be timed again, ``"graph"`` or ``"events"``."""

    @property
    def timer(self) -> str: ...

    def seconds(self) -> float:
        """Device seconds a call, of one sample."""
        ...


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds a call, in order, without those of the warm-up."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles over the median; 0 for fewer than four."""
        if len(self.seconds) < 4:
            return 0.0
        first, _, third = statistics.quantiles(self.seconds, n=4)
        return (third - first) / 2 / self.median

    @property
    def error(self) -> float:
        """Of the median, relative: that of a normal distribution with these quartiles."""
        return 1.25 * (self.spread / 0.6745) / math.sqrt(len(self.seconds))


def interleaved(
    things: Mapping[str, Sampled], *, clock: Callable[[], float], budget_s: float, seed: int = 0
) -> dict[str, Samples]:
    """Sample all in turn, in random order, until every median is known well enough or ``budget_s`` is spent.

    The first rounds, until `WARM_S` has gone by, are dropped; `FEWEST` rounds follow whatever the budget.
    """
    draw = random.Random(seed)
    found: dict[str, list[float]] = {name: [] for name in things}
    begun, warm, rounds = clock(), 0, 0
    while True:
        order = list(things)
        draw.shuffle(order)
        for name in order:
            found[name].append(things[name].seconds())
        rounds += 1
        spent = clock() - begun
        if spent < WARM_S or rounds <= _WARM_ROUNDS:
            warm = rounds
            if rounds < MOST:
                continue
            # So short that they are warm by number.
            warm, budget_s = rounds - FEWEST, 0.0
        kept = {name: Samples(tuple(each[warm:])) for name, each in found.items()}
        if rounds - warm < FEWEST:
            continue
        if spent >= budget_s or rounds - warm >= MOST or all(each.error < PRECISE for each in kept.values()):
            return kept


@dataclass(slots=True)
class Restored:
    """A batch of calls that write into their inputs, which are put back before each sample, and no part of it: what
    cannot be captured is timed by the host's clock."""

    batch: Replayed
    sets: Sequence[Mapping[str, Any]]
    originals: Sequence[Mapping[str, Any]]

    @property
    def timer(self) -> str:
        return self.batch.timer

    def seconds(self) -> float:
        for mine, original in zip(self.sets, self.originals, strict=True):
            for mine_leaf, leaf in zip(leaves(mine), leaves(original), strict=True):
                if leaf.is_tensor and leaf.value.is_floating_point():
                    mine_leaf.value.copy_(leaf.value)
        torch.cuda.synchronize()
        return self.batch.seconds()


@dataclass(slots=True)
class Rotation:
    """Copies of the inputs that fill the cache several times over, for all ways to one result."""

    sets: list[dict[str, Any]]
    device: torch.device
    # Whether a call is small beside the cache: then its results are kept, or the next call would find them there.
    small: bool
    _own: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, inputs: Mapping[str, Any], touched: int, device: torch.device, cache: int) -> Rotation:
        """``touched`` are the bytes of a call; up to a quarter of the free memory is filled with copies. A call that
        fills the cache several times over itself has the inputs as they are."""
        count = min(MOST_CALLS, max(1, math.ceil(COLD * cache / max(touched, 1))))
        if count == 1:
            return cls([dict(inputs)], device, small=False)
        free, _ = torch.cuda.mem_get_info(device)
        sets, _ = rotated(inputs, count, free // 4)
        sets = list({id(each): each for each in sets}.values())
        return cls(sets, device, small=touched < COLD * cache)

    def batch(self, call: Call, once_s: float, mutates: bool = False, plain: str = "") -> Sampled:
        """``call`` on the copies in turn, as one sample; ``once_s`` is about what one call takes, ``plain`` why it is
        not captured."""
        count = calls_of(once_s, len(self.sets))
        sets = self._copies() if mutates else self.sets
        run = call if self.small else _dropping(call)
        made = replayed(run, [sets[i % len(sets)] for i in range(count)], self.device, plain=plain)
        return Restored(made, sets, self.sets) if mutates else made

    def _copies(self) -> list[dict[str, Any]]:
        if not self._own:
            self._own = [
                {name: map_tensors(value, torch.Tensor.clone) for name, value in each.items()} for each in self.sets
            ]
        return self._own


def calls_of(once_s: float, sets: int) -> int:
    """Calls of a sample: through all copies, and for `SAMPLE_S`; whole rounds, so that all copies weigh the same."""
    wanted = math.ceil(SAMPLE_S / max(once_s, 1e-7))
    rounds = max(1, math.ceil(wanted / sets))
    return max(1, min(rounds * sets, max(sets, MOST_CALLS // sets * sets)))


def _dropping(call: Call) -> Call:
    def run(**arguments: Any) -> None:
        call(**arguments)

    return run


def once(call: Call, inputs: Mapping[str, Any], device: torch.device) -> float:
    """About how long the device takes for a call, in seconds, its inputs warm: the better of two series."""
    best = math.inf
    for _ in range(2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_ONCE_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(_ONCE_CALLS):
            call(**inputs)
        end.record()
        torch.cuda.synchronize(device)
        best = min(best, 1e-3 * float(start.elapsed_time(end)) / _ONCE_CALLS)
    return best


@dataclass(slots=True)
class Ceilings:
    """A copy of 512 MiB, by the faster of two ways, and a bfloat16 product of 8192 cubed, of random data, to be timed
    among everything else."""

    copy: Sampled
    matmul: Sampled

    @classmethod
    def on(cls, device: torch.device) -> Ceilings:
        source = torch.randint(1 << 30, (_COPIED // 4,), dtype=torch.int32, device=device)
        moved = [{"source": source, "target": torch.empty_like(source)}] * _COPIES
        copies = [replayed(way, moved, device) for way in COPIES]
        copy = min(copies, key=lambda each: min(each.seconds() for _ in range(_TRIED)))
        x, weight = (torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16, device=device) for _ in range(2))
        out = torch.empty_like(x)
        matmul = replayed(torch.mm, [{"input": x, "mat2": weight, "out": out}] * _PRODUCTS, device)
        return cls(copy, matmul)

    @staticmethod
    def copied(seconds: float) -> float:
        """Bytes a second, read and written."""
        return 2 * _COPIED / seconds

    @staticmethod
    def multiplied(seconds: float) -> float:
        """Operations a second."""
        return 2 * _SIDE**3 / seconds
