"""The random numbers of a kernel that ``rng=`` declares: what they must depend on, and what not.

If the reference takes a mask: the share of kept elements, repeated bits within a mask or between seeds, and equal masks
in every layout and in backward. Otherwise: another seed gives another result. Verdicts have the names of checks that
users know: ``repeat``, ``values``, ``gradients``. A few cases of a test run at fresh seeds; the probability of a false
alarm is below 1e-9 a test for the share, and below 1e-9 for repeated bits. Left out: masks of other sizes, which honest
kernels number anew.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_fusion.case import strided
from pytest_fusion.case.case_model import Layout
from pytest_fusion.checks.check import Check
from pytest_fusion.checks.context import Context, call
from pytest_fusion.checks.randomness import chance
from pytest_fusion.checks.randomness.backward_mask import backward
from pytest_fusion.checks.randomness.masks import Draws, Mask, Masks, can_reseed, fresh_seed, reseeded, upper_bits
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, failed, passed, unknown
from pytest_fusion.run.memory import FILLS

NAME = "rng"

# Cases with masks at fresh seeds, three calls each; with another layout's; with backward's.
_MOST_CASES, _MOST_LAYOUTS, _MOST_BACKWARDS = 6, 4, 3
_MOST_SMALL = 2
# The fewest elements of a mask that show its bits; of the few smaller masks that are tested too; that show its layout.
_ENOUGH, _SMALL, _SOME = 256, 40, 16
_SEEDS = 3
# A test's false alarms, shared by 8 cases of 3 masks, 4 comparisons, one of a bit, and 2 tails each.
_ALPHA = 1e-9 / 80
# Kernels compare 8 random bits with the probability (FlashAttention), off by up to 1/256 by design. A probability of 0
# or 1 is exact except for uniform numbers of 16 bits at an end.
_COARSE, _END = 1 / 256, 2.0**-16
# Without a mask: cases, and their elements, in which no other seed changed a bit. Some draw a probability of 0, or
# values that nothing random changes, so a few prove nothing.
_SILENT_CASES, _SILENT_ELEMENTS = 10, 64


@dataclass(slots=True)
class _State:
    """Cases by part of the check; ``focus`` is the failed part, the only one while a case shrinks."""

    cases: Counter[str] = field(default_factory=Counter)
    focus: str = ""
    varied: int = 0
    silent: int = 0
    # The least deviations that a case would have shown with 99 %: of the share of kept elements, and a correlation.
    needed: dict[str, float] = field(default_factory=dict)


def due(trial: Trial) -> bool:
    """Cases with enough elements, few of each kind; all where a probability of 0 or 1 decides everything."""
    spec, context = trial.spec, trial.context
    if spec.random is None or spec.distribution:
        return False
    if trial.draws is None:
        elements = sum(t.numel() for t in trial.got.tensors.values())
        settled = context.state(_State).varied or context.state(_State).silent > _SILENT_CASES
        wanted = bool(context.state(_State).focus) or not settled
        return wanted and elements >= _SILENT_ELEMENTS and can_reseed(spec, trial.logical)
    return bool(_parts(trial, trial.draws)) or trial.draws.masks.p in (0.0, 1.0)


def _parts(trial: Trial, draws: Draws) -> list[str]:
    """The parts that run on this case; while a failure shrinks, its own."""
    state, p, count = trial.context.state(_State), draws.masks.p, draws.mask.count
    random = p not in (0.0, 1.0) and can_reseed(trial.spec, trial.logical)
    if count < _ENOUGH and p is not None:
        random = random and chance.alike_by_chance(p, count) < _ALPHA
    strided = any(tensor.layout != Layout() for tensor in trial.result.case.tensors.values())
    graded = bool(trial.spec.grad) and trial.context.on("gradients")
    fresh, most = (NAME, _MOST_CASES) if count >= _ENOUGH else ("rng small", _MOST_SMALL)
    # Whether the part can run, its fewest elements and most cases where nothing shrinks.
    able = {
        fresh: (random and count >= _SMALL, _SMALL, most),
        "rng layouts": (strided and count >= 2, _SOME, _MOST_LAYOUTS),
        "rng backward": (graded and count >= 1, _SOME, _MOST_BACKWARDS),
    }
    if state.focus:
        return [part for part, (can, _, _) in able.items() if can and part.replace(" small", "") == state.focus]
    return [part for part, (can, least, most) in able.items() if can and count >= least and state.cases[part] < most]


def run(trial: Trial) -> Verdict:
    """The first property that does not hold."""
    context, draws = trial.context, trial.draws
    found, verdict = "ends", _without_mask(trial) if draws is None else _at_the_ends(draws.masks, draws.mask)
    for part in () if draws is None else _parts(trial, draws):
        if verdict is None and draws is not None:
            context.state(_State).cases[part] += 1
            found, verdict = part, _PARTS[part](trial, draws.masks, draws.mask)
    if verdict is None:
        return passed("repeat")
    if verdict.failed and context.on(verdict.check):
        context.state(_State).focus = NAME if found == "rng small" else found
    return verdict


def summary(context: Context) -> Verdict | None:
    """`unknown` for what no case of the test could show."""
    state = context.state(_State)
    if context.spec.random is None or context.spec.distribution or not context.on("repeat"):
        return None
    if context.spec.random.mask is not None:
        if state.needed:
            return passed("repeat", would_find=state.needed)
        why = f"no case had {_SMALL} elements that are dropped with a probability between 0 and 1"
        return unknown("repeat", f"whether the mask depends on the seed is not known: {why}")
    if not state.varied:
        return unknown("repeat", "whether the result depends on the seed is not known: it was the same for all of them")
    return None


def notes(context: Context) -> list[str]:
    """One sentence on the deviations of masks that would have been found."""
    found = context.state(_State).needed
    share = f"a share of kept elements that is {found['share']:.2g} off, " if "share" in found else ""
    alike = (
        f"the masks of rng= would show with 99 %: {share}a correlation of {found.get('correlation', 1):.2g} within one"
    )
    return [f"{alike}, between rows or between calls"] if found else []


def _fails(check: str, slug: str, cause: str, reason: str, **evidence: Any) -> Verdict:
    return failed(check, reason, identity=f"{check}:rng-{slug}", cause=cause, **evidence)


def _at_the_ends(masks: Masks, mask: Mask) -> Verdict | None:
    """Check that a probability of 0 keeps everything, and 1 nothing."""
    if masks.p not in (0.0, 1.0):
        return None
    wrong = mask.known & (mask.keep == (masks.p == 1.0))
    count, total = int(wrong.sum()), mask.count
    if chance.at_least(count, total, _END) >= _ALPHA:
        return None
    what = "dropped" if masks.p == 0.0 else "kept"
    first, given = [int(i) for i in wrong.nonzero()[0]], f"though the probability to drop is {masks.p:g}"
    reason = f"{count} of {total} element(s) are {what} {given}, the first at {first}"
    return _fails("values", "ends", "biased-mask", reason, count=count, total=total, first=first)


def _fresh(trial: Trial, masks: Masks, _: Mask) -> Verdict | None:
    """Check the masks of three successive seeds."""
    start = fresh_seed(trial.result.case, 1)
    found = [masks.at(start + i) for i in range(_SEEDS)]
    seen = [m for m in found if m is not None and m.count >= 2]
    if len(seen) < _SEEDS:
        return None
    verdict = _ignored(trial, masks, seen, start) or _repeats(trial, masks, seen, start)
    verdict = verdict or _share(masks, seen, start)
    share, least = _keep_share(seen), min(m.count for m in seen)
    if chance.alike_by_chance(share, least) < _ALPHA:
        state = trial.context.state(_State)
        needed = {"correlation": chance.needed_correlation(share, least, _ALPHA)}
        if masks.p is not None:
            total = sum(m.count for m in seen)
            needed["share"] = _COARSE + chance.needed(total, 2 * _ALPHA, share * (1 - share))
        state.needed |= {kind: round(min(one, state.needed.get(kind, 1.0)), 5) for kind, one in needed.items()}
    return verdict


def _keep_share(seen: list[Mask]) -> float:
    return sum(int((m.keep & m.known).sum()) for m in seen) / max(sum(m.count for m in seen), 1)


def _share(masks: Masks, seen: list[Mask], start: int) -> Verdict | None:
    """Check the share of kept elements against chance."""
    if masks.p is None or masks.p in (0.0, 1.0):
        return None
    count, total = sum(int((m.keep & m.known).sum()) for m in seen), sum(m.count for m in seen)
    expected = 1 - masks.p
    low, high = max(expected - _COARSE, _END), min(expected + _COARSE, 1 - _END)
    if min(chance.at_most(count, total, low), chance.at_least(count, total, high)) >= _ALPHA:
        return None
    share = count / total
    inverted = abs(share - masks.p) < abs(share - expected) / 4
    likely = "the kernel keeps what it should drop" if inverted else "the threshold or the random numbers are off"
    reason = (
        f"{count} of {total} elements ({share:.4g}) are kept over {len(seen)} seeds from {start} on, where "
        f"p={masks.p:g} means {expected:.4g}: {likely}. Where p is not the probability to drop, say so: "
        "rng=rng(..., p=lambda p: 1 - p)"
    )
    return _fails("values", "share", "biased-mask", reason, kept=count, total=total, expected=expected)


def _ignored(trial: Trial, masks: Masks, seen: list[Mask], start: int) -> Verdict | None:
    """Check that other seeds give another mask: successive ones, and one that differs in an upper bit."""
    context, first, cases = trial.context, seen[0], trial.context.state(_State).cases
    if chance.alike_by_chance(_keep_share(seen), first.count) >= _ALPHA:
        return None

    def equal(seeds: list[int], others: Iterable[Mask | None], why: str) -> Verdict | None:
        for other in others:
            if other is None or other.keep.shape != first.keep.shape or bool(first.differs(other).any()):
                return None
        listed = ", ".join(map(str, seeds))
        reason = f"the seeds {listed} give the same mask of {first.count} elements: the seed {why}"
        return _fails("repeat", "seed", "seed-ignored", reason, seeds=seeds)

    verdict = equal([start + i for i in range(len(seen))], seen[1:], "does not reach the random numbers")
    bits = upper_bits(cases[NAME] + cases["rng small"], every=bool(context.state(_State).focus) or context.complete)
    for bit in bits if verdict is None else ():
        seed, why = start ^ (1 << bit), f"is cut to fewer bits, without bit {bit}, so that many seeds are one"
        verdict = verdict or equal([start, seed], [masks.at(seed)], why)
    return verdict


def _repeats(trial: Trial, masks: Masks, seen: list[Mask], start: int) -> Verdict | None:
    """Check that no mask repeats itself, or that of another seed or call."""

    def where(period: int) -> str:
        width = masks.shape[-1] if masks.shape else 1
        return f"{period // width} row(s)" if width > 1 and period % width == 0 else f"{period} element(s)"

    verdict = _shared(
        ("values", "pattern"),
        [_correlated(m, m, itself=True) for m in seen],
        lambda at: (
            f"the mask of seed {start}, as of the {len(seen) - 1} seeds after it, repeats itself after {where(at)}"
        ),
        "every element needs a random number of its own; an offset that starts again in each row or program gives all "
        "of them the same",
    ) or _shared(
        ("repeat", "overlap"),
        [_correlated(a, b) for a, b in itertools.pairwise(seen)],
        lambda at: f"the mask of seed {start + 1} is that of seed {start} moved by {abs(at)} element(s)",
        "seed and offset are added up, so that neighbouring seeds share their random numbers",
    )
    if verdict is not None or masks.rng.seed is not None or trial.spec.mutates:
        return verdict
    calls = [seen[0], masks.at(start, calls=2), masks.at(start, calls=3)]
    return _shared(
        ("repeat", "next-call"),
        [None if a is None or b is None else _correlated(a, b) for a, b in itertools.pairwise(calls)],
        lambda at: f"the mask of the next call is that of the one before it, moved by {abs(at)} element(s)",
        "the generator's state is not advanced by as many numbers as were drawn",
    )


def _shared(
    kind: tuple[str, str], found: list[chance.Correlation | None], what: Callable[[int], str], why: str
) -> Verdict | None:
    """The failure of masks that are correlated in every comparison; ``what`` takes the distance of the first."""
    first = found[0]
    if first is None or None in found:
        return None
    reason = f"{what(first.distance)} (correlation {first.strength:.2f}, where independent bits have 0): {why}"
    return _fails(*kind, "repeated-mask", reason, distance=first.distance, strength=first.strength)


def _correlated(a: Mask, b: Mask, *, itself: bool = False) -> chance.Correlation | None:
    if a.keep.shape != b.keep.shape:
        return None
    known = (a.known & b.known).flatten()
    return chance.correlated(a.keep.flatten(), b.keep.flatten(), known, alpha=_ALPHA, itself=itself)


def _layouts(trial: Trial, masks: Masks, mask: Mask) -> Verdict | None:
    """Check that contiguous inputs give the mask of the case's own layouts."""
    case = trial.result.case
    # Only an expanded layout holds a single slice.
    plain_case = case.contiguous(
        name for name, tensor in case.tensors.items() if not strided.repeats(tensor.layout.kind)
    )
    other = masks.at(case=plain_case)
    if other is None or mask.keep.shape != other.keep.shape:
        return None
    different = mask.differs(other)
    if not bool(different.any()):
        return None
    again = masks.at()
    if again is None or bool(mask.differs(again).any()):
        return None  # chance, or a draw that follows the values
    layouts = {name: str(t.layout) for name, t in case.tensors.items() if t.layout != plain_case.tensors[name].layout}
    first = [int(i) for i in different.nonzero()[0]]
    listed = ", ".join(f"{name} {layout}" for name, layout in layouts.items())
    reason = (
        f"{int(different.sum())} of {mask.count} elements, the first at {first}, are kept or dropped depending on the "
        f"layout ({listed}, against contiguous) at the same seed: draw by the element's index, not by its address. "
        "Forward and backward see other layouts"
    )
    return _fails("repeat", "layout", "mask-mismatch", reason, layouts=layouts, first=first)


def _without_mask(trial: Trial) -> Verdict | None:
    """Check that some result of some case depends on the seed."""
    context, state = trial.context, trial.context.state(_State)
    context.state(_State).cases[NAME] += 1
    start = fresh_seed(trial.result.case, 1)
    before: dict[str, torch.Tensor] = {}
    for number in range(_SEEDS):
        other, logical = reseeded(context, trial.logical, start + number)
        outcome, placed = call(other, trial.result.case, logical, FILLS[0])
        if outcome.error is not None:
            return None
        now = {name: t.detach().clone() for name, t in trial.collect(outcome, placed).tensors.items()}
        if before and repeat.first_difference(before, now) is not None:
            state.varied += 1
            return None
        before = before or now
    state.silent += 1
    if state.varied or state.silent < _SILENT_CASES:
        return None
    reason = (
        f"the seeds {start} to {start + _SEEDS - 1} give the same bits, as other seeds did in {state.silent - 1} cases "
        "before: the seed does not reach the random numbers; leave rng= out if nothing here is random"
    )
    return _fails("repeat", "seed", "seed-ignored", reason)


_PARTS: Mapping[str, Callable[[Trial, Masks, Mask], Verdict | None]] = {
    NAME: _fresh,
    "rng small": _fresh,
    "rng layouts": _layouts,
    "rng backward": backward,
}


CHECK = Check(NAME, run, due=due, summary=summary, notes=notes, reported=False)
