"""Sampled outputs against the reference's probabilities, for ``distribution=``.

Every case: shape, whole numbers, no draw outside the vocabulary or of probability 0. A few cases run at many seeds,
with as many rows as a call takes, in every second case equal ones. Their draws are counted by classes of entries
(`frequencies`), and rows and calls are compared with each other. What is odd is drawn again at other seeds, which alone
decide. The probability of a false alarm is below 1e-6 a test. The evidence has the deviations that would be odd.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_fusion.case import counter_random, sizes
from pytest_fusion.case.case_model import Case, Layout
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.case.plan import cost, refit
from pytest_fusion.checks.check import Check
from pytest_fusion.checks.context import CaseResult, Context, call, reference_of
from pytest_fusion.checks.randomness import chance
from pytest_fusion.checks.randomness.frequencies import CALLS, CLASSES, ROWS, Seen, described, pooled, seen_in
from pytest_fusion.checks.randomness.masks import can_reseed, fresh_seed, reseeded, upper_bits
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, failed, passed, unknown
from pytest_fusion.errors import SpecError
from pytest_fusion.oracle.reference import MANY_LANES, ReferenceFailed
from pytest_fusion.run.clock import processor_s
from pytest_fusion.run.memory import FILLS
from pytest_fusion.spec.wording import did_you_mean

NAME = "distribution"

# Cases of a test that are drawn again; draws of one, of one with equal rows, and its calls.
_MOST_CASES = 5
_DRAWS, _DRAWS_OF_ONE, _FEWEST_CALLS, _MOST_CALLS = 1 << 14, 1 << 17, 8, 128
# Of few outcomes most faults misplace less: one case has fewer than so many, unless as many cases in a row do.
_WIDE = 16
# Seconds of the processor for the calls of a case, but for the first. Interpreted, most kernels take as long for a
# thousand rows as for one, some a thousand times as long: the calls of the first case decide between these rows.
_SECONDS, _FEWEST_SEEDS, _FAST_S, _ROWS = 0.7, 3, 0.02, (256, 2048)
# How many times as many draws decide what looks odd, and what is still in doubt then.
_MORE, _DOUBT = (2, 4), 0.2
# The fewest draws for a verdict, of all cases and of one.
_ENOUGH, _SOME = 400, 80
# A false alarm needs one class that was odd to be wrong on the later draws alone.
_ALPHA, _LOOKS = 1e-6, _MOST_CASES * len(_MORE)
# The share of right samplers for which some class of a family looks odd.
_ODD = 2e-3
# How far the probabilities of a row may add up to other than one.
_ONE = 1e-2
# The variance of a draw from two halves of a row, the largest that there is.
_HALVES = 1 / 4
# Rows are equal up to the rounding of sums in another order.
_SAME = 1e-6


@dataclass(slots=True)
class _State:
    """The draws of all cases by output, and the share of one row's mass that is odd with 99 % where it is least.

    ``found``: a wrong ``draw`` or ``cut`` seed, which shrink, or a ``statistic``, which would need too many calls.
    """

    cases: int = 0
    narrow: int = 0
    draws: int = 0
    seen: dict[str, Seen] = field(default_factory=dict)
    one_row: dict[str, float] = field(default_factory=dict)
    rows: int = _ROWS[0]
    found: str = ""


def due(trial: Trial) -> bool:
    """Every case of a spec with sampled outputs."""
    return bool(trial.spec.distribution)


def run(trial: Trial) -> Verdict:
    """The verdict on single draws, else on all together."""
    unnamed = [name for name in trial.spec.sampled if name not in trial.sampled]
    if unnamed:
        known = [*trial.sampled, *trial.order]
        raise SpecError(
            f"{trial.spec.name}: distribution={unnamed[0]!r} names no output of the reference"
            f"{did_you_mean(unnamed[0], known)}"
        )
    rows = {name: _Rows(p) for name, p in trial.sampled.items()}
    for name, own in rows.items():
        verdict = _wrong_form(trial, name, own) or _impossible(trial, name, own, trial.got.tensors[name])
        if verdict is not None:
            return verdict
    return _drawn_again(trial, rows) or passed("values")


def summary(context: Context) -> Verdict | None:
    """The deviations that would have been found; `unknown` with too few draws for a verdict on the distribution."""
    state = context.state(_State)
    if not context.spec.distribution or not context.on("values"):
        return None
    if state.draws >= _ENOUGH:
        return passed("values", draws=state.draws, would_find=_needed(state))
    return unknown(
        "values",
        f"{state.draws} draw(s) are too few to judge a distribution; {_ENOUGH} are needed: allow more rows in dims=, "
        "and rows with more than one outcome",
    )


def notes(context: Context) -> list[str]:
    """One sentence on the deviations that would have been found."""
    state = context.state(_State)
    if state.draws < _ENOUGH or state.found:
        return []
    least = _needed(state)
    shares = [f"{100 * least[kind]:.2g} % of {kind}'s probability moved" for kind in ("one row", "every row")]
    alike = [f"a correlation of {least[kind]:.2g} {kind}" for kind in (ROWS, CALLS)]
    return [f"the {state.draws:,} draws of distribution= would find with 99 %: {', '.join([*shares, *alike])}"]


def _needed(state: _State) -> dict[str, float]:
    """The least deviation of each kind that looks odd with 99 %, of the output for which it is largest.

    Shares of probability that move between halves of a row; of rarer entries less is enough.
    """
    least = {"one row": 0.0, "every row": 0.0, ROWS: 0.0, CALLS: 0.0}
    for name, seen in state.seen.items():
        draws = max(found.draws for family, found in seen.items() if family not in least)
        own = {"one row": state.one_row[name], "every row": chance.needed(draws, _ODD / CLASSES, _HALVES)}
        own |= {kind: chance.needed(c.draws, _ODD, largest=c.largest) for kind, c in seen.items() if kind in least}
        least = {kind: round(max(share, own.get(kind, 1.0)), 5) for kind, share in least.items()}
    return least


class _Rows:
    """The probabilities of every draw, ``(draws, vocabulary)`` in float64, and which rows are valid."""

    def __init__(self, probabilities: torch.Tensor) -> None:
        vocabulary = probabilities.shape[-1] if probabilities.dim() else 0
        self.full, self.shape = probabilities.shape, probabilities.shape[:-1]
        self.p = probabilities.detach().to(torch.float64).reshape(math.prod(self.shape), vocabulary)
        self.sound = ((self.p.sum(-1) - 1).abs() <= _ONE) & (self.p >= 0).all(-1)
        self.count = int(self.sound.sum())
        # Rows with more than one outcome.
        self._open = self.sound & (self.p.amax(-1) < 1 - _ONE) if vocabulary else torch.zeros_like(self.sound)
        self.open = int(self._open.sum())
        p = self.p[self._open]
        self.equal = bool(((p - p[:1]).abs() < _SAME).all())

    def seen(self, trial: Trial, drawn: torch.Tensor, lanes: Sequence[torch.Tensor] = ()) -> Seen:
        """Draws ``(calls, rows)`` against the probabilities, or as near as any of the ``lanes`` comes to them."""

        def of_open(t: torch.Tensor) -> torch.Tensor:
            return t.detach().to(torch.float64).reshape(self.p.shape)[self._open]

        every = [of_open(p).nan_to_num() for p in (self.p, *lanes)]
        every = [p / p.sum(-1, keepdim=True) for p in every]
        inputs = {
            name: of_open(t)
            for name, t in trial.logical.items()
            if isinstance(t, torch.Tensor) and t.shape == self.full and not t.is_complex()
        }
        picked, seed = drawn[:, self._open], counter_random.mix(trial.result.case.seed, "places")
        return seen_in(every, picked, inputs, seed)

    def one_row(self, calls: int) -> float:
        """The share of one row's mass that looks odd in ``calls`` with 99 %; equal rows are one."""
        draws, rows = (calls * self.open, 1) if self.equal else (calls, self.open)
        return chance.needed(draws, _ODD / CLASSES / rows, _HALVES)


def _wrong_form(trial: Trial, name: str, rows: _Rows) -> Verdict | None:
    got, index = trial.got.tensors[name], torch.int64
    whole = not (got.dtype.is_floating_point or got.dtype.is_complex or got.dtype is torch.bool)
    for what, found, allowed in (
        ("shape", tuple(got.shape), tuple(rows.shape)),
        ("device", got.device, trial.sampled[name].device),
        ("dtype", index if whole else got.dtype, index),
    ):
        if found != allowed:
            reason = f"{name} has {what} {found}; one draw for each row of the reference's probabilities is {allowed}"
            return failed("structure", reason, identity=f"structure:{name}:{what}", output=name)
    return None


def _biased(name: str, slug: str, reason: str, **facts: Any) -> Verdict:
    identity = f"values:rng-{slug}:{name}"
    return failed("values", reason, identity=identity, cause="biased-sampling", output=name, **facts)


def _impossible(trial: Trial, name: str, rows: _Rows, got: torch.Tensor) -> Verdict | None:
    """The failure of draws that no seed allows: outside the vocabulary, or of probability 0 in any rounding."""
    drawn, vocabulary = got.reshape(-1).to(torch.int64), rows.p.shape[-1]

    def wrong(where: torch.Tensor, slug: str, what: str) -> Verdict | None:
        if not bool(where.any()):
            return None
        at, count = int(where.nonzero()[0]), int(where.sum())
        reason = f"{count} of {rows.count} draws of {name} {what}, the first is {int(drawn[at])} in row {at}"
        return _biased(name, slug, f"{reason} with {int((rows.p[at] > 0).sum())} possible entries", count=count)

    outside = rows.sound & ((drawn < 0) | (drawn >= vocabulary))
    verdict = wrong(outside, "range", f"are outside the vocabulary of {vocabulary}")
    never = rows.sound & (_of(rows.p, drawn) == 0) if vocabulary and verdict is None else outside
    if verdict is not None or not bool(never.any()):
        return verdict
    lanes = trial.runs.fresh_lanes(name, MANY_LANES, "E")
    for lane in (lanes.oracle, *lanes.lanes):
        never &= _of(lane.to(torch.float64).reshape(rows.p.shape), drawn) == 0
    return wrong(never, "support", "have probability 0, as a cut (top-k, top-p, a mask) is elsewhere")


def _of(p: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """The probability of each draw; meaningless for one outside the vocabulary."""
    return p.gather(-1, drawn.clamp(0, p.shape[-1] - 1)[:, None])[:, 0]


def _drawn_again(trial: Trial, rows: dict[str, _Rows]) -> Verdict | None:
    """Draw at many seeds; if this case or all cases together look odd, at many more."""
    context, state, result = trial.context, trial.context.state(_State), trial.result
    if state.found == "statistic" or not can_reseed(trial.spec, trial.logical):
        return None
    sure = bool(state.found) or context.complete
    if not any(own.open for own in rows.values()) or (not sure and state.cases >= _MOST_CASES):
        return None
    if not sure:
        narrow = max(own.p.shape[-1] for own in rows.values()) < _WIDE
        state.narrow += narrow
        if narrow and 1 < state.narrow <= _WIDE:
            return None
        trial = of_many_rows(trial, state.rows, equal=state.cases % 2 == 1)
        rows = {name: _Rows(p) for name, p in trial.sampled.items()}
    most = max(own.open for own in rows.values())
    draws = _DRAWS_OF_ONE if any(own.equal for own in rows.values()) else _DRAWS
    calls = min(max(draws // max(most, 1), _FEWEST_CALLS), _MOST_CALLS)
    if not sure and most * calls < _SOME:
        return None
    state.cases += 1
    # Of a cut seed only equal pairs count: with all other draws the smallest case took 118 s instead of 4.
    calls = 1 if state.found == "cut" else calls
    start, bits = fresh_seed(trial.result.case, 1), upper_bits(state.cases, every=sure)
    begun, seeds = processor_s(), [*(start ^ (1 << bit) for bit in bits), *range(start, start + calls)]
    drawn, verdict = _draw(trial, rows, seeds, limit_s=math.inf if sure else _SECONDS)
    took = (processor_s() - begun) / max(len(next(iter(drawn.values()))), 1) if drawn else math.inf
    state.rows = _ROWS[took < _FAST_S]
    found, verdict = ("draw", verdict) if not drawn else _ignored(rows, drawn, start, bits)
    for name, own in rows.items() if calls > 1 else ():
        if drawn and verdict is None and own.open:
            before = drawn[name][len(bits) :]
            state.draws += own.open * len(before)
            found, verdict = "statistic", _of_more_draws(trial, name, own, before, start)
    if verdict is not None:
        state.found, result.case = found, trial.result.case
    return verdict


def _of_more_draws(trial: Trial, name: str, rows: _Rows, before: torch.Tensor, start: int) -> Verdict | None:
    """The verdict of later seeds, which alone decide where the draws ``before`` them looked odd."""
    state, calls = trial.context.state(_State), len(before)
    seen = rows.seen(trial, before)
    state.one_row[name] = min(rows.one_row(calls), state.one_row.get(name, 1.0))
    state.seen[name] = pooled(seen, state.seen.get(name, {}))
    both = {f: (c.p, state.seen[name].get(f, c).p) for f, c in seen.items()}
    odd = {f: torch.minimum(*p) < _ODD / len(p[0]) for f, p in both.items()}
    suspect = any(bool(mask.any()) for mask in odd.values())
    for times in _MORE if suspect or trial.context.complete else ():
        start, calls = start + calls, calls * times
        drawn, verdict = _draw(trial, {name: rows}, range(start, start + calls))
        if not drawn:
            return verdict
        tested = odd if suspect else {family: ~mask for family, mask in odd.items()}
        verdict, p = _misfit(trial, name, rows, drawn[name], start, tested)
        if verdict is not None or p >= _DOUBT:
            return verdict
    return None


def _draw(
    trial: Trial, rows: dict[str, _Rows], seeds: Sequence[int], *, limit_s: float = math.inf
) -> tuple[dict[str, torch.Tensor], Verdict | None]:
    """Draws by output, ``(calls, draws)``; none where a call raises, and a verdict where a draw is impossible."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in rows}
    until = processor_s() + limit_s
    for number, seed in enumerate(seeds):
        if number >= _FEWEST_SEEDS and processor_s() > until:
            break
        context, logical = reseeded(trial.context, trial.logical, seed)
        outcome, placed = call(context, trial.result.case, logical, FILLS[0])
        got = {} if outcome.error is not None else trial.collect(outcome, placed).tensors
        if any(name not in got or got[name].shape != own.shape for name, own in rows.items()):
            return {}, None
        for name, own in rows.items():
            verdict = _impossible(trial, name, own, got[name])
            if verdict is not None:
                return {}, verdict
            found[name].append(got[name].detach().reshape(-1).to(torch.int64).clone())
    return {name: torch.stack(drawn) for name, drawn in found.items()}, None


def _ignored(
    rows: dict[str, _Rows], drawn: dict[str, torch.Tensor], start: int, bits: Sequence[int]
) -> tuple[str, Verdict | None]:
    """The failure of successive seeds, or of two that differ in a bit, to draw differently where that is unlikely."""
    first, calls = len(bits), len(next(iter(drawn.values())))
    looks = [("draw", [*range(first, calls)], f"the seeds {start} to {start + calls - first - 1}")]
    for i, bit in enumerate(bits):
        seeds = f"the seeds {start} and {start ^ (1 << bit)}, which differ in bit {bit} alone,"
        looks.append(("cut", [first, i], seeds))
    for (found, calls_of, seeds), (name, own) in itertools.product(looks, rows.items()):
        same = drawn[name][calls_of]
        likely = float(_of(own.p, same[0])[own.sound].log().sum()) * (len(same) - 1)
        if bool((same == same[:1]).all()) and likely < math.log(_ALPHA / _LOOKS):
            chances = f"which has a probability of about 1e{round(likely / math.log(10))}"
            reason = f"{seeds} draw the same {name}, {chances}: the seed does not reach the random numbers"
            return found, failed("repeat", reason, identity="repeat:rng-seed", cause="seed-ignored", output=name)
    return "", None


def _misfit(
    trial: Trial, name: str, rows: _Rows, drawn: torch.Tensor, start: int, odd: Mapping[str, torch.Tensor]
) -> tuple[Verdict | None, float]:
    """The finding in draws of the classes that looked ``odd`` before, and the probability of any of them by chance."""
    lanes = trial.runs.fresh_lanes(name, MANY_LANES, "E")
    seen = rows.seen(trial, drawn, (lanes.oracle, *lanes.lanes))
    tested = {family: torch.where(odd[family], found.p, 1.0) for family, found in seen.items()}
    family = min(tested, key=lambda f: float(tested[f].min()))
    index, p, found = int(tested[family].argmin()), float(tested[family].min()), seen[family]
    count = sum(int(mask.sum()) for mask in odd.values())
    allowed = _ALPHA / _LOOKS / count
    if p >= allowed:
        return None, p * count
    excess, seeds = float(found.excess[index]), f"at the {len(drawn)} seeds from {start} on"
    slug = {ROWS: "rows", CALLS: "calls"}.get(family, "distribution")
    if family in (ROWS, CALLS):
        reason = (
            f"{name} is drawn alike {family}: {seeds} places in the rows' probabilities have a correlation of "
            f"{excess / found.draws:.2g}; {slug} share their random numbers"
        )
    else:
        more = f"{abs(excess):.0f} times {'more' if excess > 0 else 'less'}"
        reason = (
            f"{found.draws} draws of {name} {seeds} do not follow the reference's probabilities: "
            f"{described(family, index)}, was drawn {more} than expected, "
            f"{100 * abs(excess) / found.draws:.2g} % of all"
        )
    return _biased(name, slug, f"{reason} (p = {p:.1g} where {allowed:.1g} is allowed)", p=p), p


# Elements of the largest tensor.
_ELEMENTS = 1 << 16


def of_many_rows(trial: Trial, rows: int, *, equal: bool) -> Trial:
    """The case with up to so many rows, ``equal`` ones where layouts allow that; unchanged where no dim gives any."""
    context = trial.context
    for dim in trial.spec.sized:
        try:
            case = _resized(trial, dim, rows, equal=equal)
            with context.clock.phase("make"):
                logical = make_inputs(trial.spec, case, context.device)
            reference, expected = reference_of(context, case, logical, priced=False)
        except (ImpossibleCase, InputFailed, ReferenceFailed):
            continue
        made = Trial(context, CaseResult(case), logical, reference, expected, trial.alone)
        both = [(p, made.sampled[name]) for name, p in trial.sampled.items()]
        same = all(bool((after == after[:1]).all()) for _, after in both)
        if all(p.shape[-1:] == after.shape[-1:] and after.numel() >= p.numel() + (not same) for p, after in both):
            return made
    return trial


def _resized(trial: Trial, dim: str, size: int, *, equal: bool) -> Case:
    """The case with more of the dim; with ``equal``, tensors whose first dim it is repeat one slice."""
    case = other = trial.result.case
    while size > sizes.count(case.sizes[dim]):
        larger = case.with_(sizes=refit(trial.spec, {**case.sizes, dim: size}))
        if cost(trial.spec, larger)[0] <= _ELEMENTS:
            other = larger
            break
        size //= 2
    for name, inner in trial.spec.tensors.items() if equal else ():
        first = inner.shape.terms[:1]
        if name in other.tensors and "expanded" in inner.layouts and first and first[0].names == (dim,):
            other = other.with_tensor(name, layout=Layout("expanded"))
    if other == case:
        raise ImpossibleCase(f"no more of {dim}")
    return other


CHECK = Check(NAME, run, due=due, summary=summary, notes=notes, reported=False)
