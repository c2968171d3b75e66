"""Sampled outputs against the reference's probabilities, for ``distribution=``.

Every case: shape, whole numbers, no draw outside the vocabulary or of probability 0. A few cases run at many seeds.
Each draw becomes a number that is uniform if the draw is right, by its place in the cumulated probabilities. Rows of
any distribution then form one sample, which G-tests compare with the uniform one: with the vocabulary in its own order
and by falling probability, in 4 and in 16 parts. Odd results are drawn again at other seeds, which alone decide. The
probability of a false alarm is below 1e-6 a test.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from pytest_fusion.case import counter_random
from pytest_fusion.checks.check import Check
from pytest_fusion.checks.context import Context, call
from pytest_fusion.checks.randomness import chance
from pytest_fusion.checks.randomness.masks import can_reseed, fresh_seed, reseeded, upper_bits
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, failed, passed, unknown
from pytest_fusion.errors import SpecError
from pytest_fusion.oracle.reference import MANY_LANES
from pytest_fusion.run.memory import FILLS
from pytest_fusion.spec.wording import did_you_mean

NAME = "distribution"

# Draws and calls of a case, and cases of a test. Odd results are drawn again four times as often, and once more.
_DRAWS, _FEWEST_CALLS, _MOST_CALLS, _MORE, _ROUNDS, _MOST_CASES = 1024, 8, 48, 4, 2, 5
# The fewest draws for a verdict.
_ENOUGH = 400
# A false alarm needs one test of one case to be wrong on the later draws alone.
_ALPHA, _LOOKS = 1e-6, 5 * _ROUNDS * _MOST_CASES
_ODD = 1e-3
_ORDERS = ("by falling probability", "in its own order")
_BINS, _DRAWS_PER_BIN = (4, 16), 8
_FEWEST_ROWS = 4
# How far the probabilities of a row may add up to other than one.
_ONE = 1e-2

_Key = tuple[str, str, int]


@dataclass(slots=True)
class _State:
    """Draws of all cases, and their counts by output, order and number of parts.

    ``found``: a wrong ``draw`` or ``cut`` seed, which shrink, or a ``statistic``, which would need too many calls.
    """

    cases: int = 0
    draws: int = 0
    counts: dict[_Key, torch.Tensor] = field(default_factory=dict)
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
    """`unknown` with too few draws for a verdict on the distribution."""
    draws = context.state(_State).draws
    if not context.spec.distribution or not context.on("values") or draws >= _ENOUGH:
        return None
    return unknown("values", f"{draws} draw(s) are too few to judge a distribution; {_ENOUGH} are needed")


class _Rows:
    """The probabilities of every draw, ``(draws, vocabulary)`` in float64, and which rows are valid."""

    def __init__(self, probabilities: torch.Tensor) -> None:
        vocabulary = probabilities.shape[-1] if probabilities.dim() else 0
        self.shape = probabilities.shape[:-1]
        self.p = probabilities.detach().to(torch.float64).reshape(math.prod(self.shape), vocabulary)
        self.sound = ((self.p.sum(-1) - 1).abs() <= _ONE) & (self.p >= 0).all(-1)
        self.count = int(self.sound.sum())
        self.open = int((self.sound & (self.p.amax(-1) < 1 - _ONE)).sum()) if vocabulary else 0


def _wrong_form(trial: Trial, name: str, rows: _Rows) -> Verdict | None:
    got = trial.got.tensors[name]
    for what, found, allowed in (
        ("shape", tuple(got.shape), tuple(rows.shape)),
        ("device", got.device, trial.sampled[name].device),
    ):
        if found != allowed:
            reason = f"{name} has {what} {found}; one draw for each row of the reference's probabilities is {allowed}"
            return failed("structure", reason, identity=f"structure:{name}:{what}", output=name)
    if got.dtype.is_floating_point or got.dtype.is_complex or got.dtype is torch.bool:
        reason = f"{name} has dtype {got.dtype}, which is none of indices; return a whole number for each row"
        return failed("structure", reason, identity=f"structure:{name}:dtype", output=name)
    return None


def _impossible(trial: Trial, name: str, rows: _Rows, got: torch.Tensor) -> Verdict | None:
    """The failure of draws that no seed allows: outside the vocabulary, or of probability 0 in any rounding."""
    drawn, vocabulary = got.reshape(-1).to(torch.int64), rows.p.shape[-1]
    outside = rows.sound & ((drawn < 0) | (drawn >= vocabulary))
    if bool(outside.any()):
        at, count = int(outside.nonzero()[0]), int(outside.sum())
        return failed(
            "values",
            f"{count} of {rows.count} draws of {name} are outside the vocabulary of {vocabulary}, the first is "
            f"{int(drawn[at])} in row {at}",
            identity=f"values:rng-range:{name}",
            cause="biased-sampling",
            output=name,
            count=count,
        )
    if not vocabulary:
        return None
    wrong = rows.sound & (_of(rows.p, drawn) == 0)
    if not bool(wrong.any()):
        return None
    lanes = trial.runs.fresh_lanes(name, MANY_LANES, "E")
    for lane in (lanes.oracle, *lanes.lanes):
        wrong &= _of(lane.to(torch.float64).reshape(rows.p.shape), drawn) == 0
    if not bool(wrong.any()):
        return None
    at, count = int(wrong.nonzero()[0]), int(wrong.sum())
    rank = int((rows.p[at] > 0).sum())
    return failed(
        "values",
        f"{count} of {rows.count} draws of {name} have probability 0, the first is {int(drawn[at])} in row {at}, where "
        f"{rank} of {vocabulary} entries can be drawn: a cut (top-k, top-p, a mask) is elsewhere",
        identity=f"values:rng-support:{name}",
        cause="biased-sampling",
        output=name,
        count=count,
    )


def _of(p: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """The probability of each draw; meaningless for one outside the vocabulary."""
    inside = drawn.clamp(0, p.shape[-1] - 1)
    return p.gather(-1, inside[:, None])[:, 0]


def _drawn_again(trial: Trial, rows: dict[str, _Rows]) -> Verdict | None:
    """Draw at many seeds; if this case or all cases together look odd, at many more."""
    context, state = trial.context, trial.context.state(_State)
    most = max((own.open for own in rows.values()), default=0)
    if state.found == "statistic" or not most or not can_reseed(trial.spec, trial.logical):
        return None
    sure = bool(state.found) or context.complete
    calls = min(max(_DRAWS // most, _FEWEST_CALLS), _MOST_CALLS)
    if not sure and (state.cases >= _MOST_CASES or most * calls < _ENOUGH // _MOST_CASES):
        return None
    state.cases += 1
    start = fresh_seed(trial.result.case, 1)
    if state.found == "cut":
        # Only equal pairs count: with all other draws the smallest case took 118 s instead of 4.
        drawn, verdict = _draw(trial, rows, [start])
        return verdict or (_cut(trial, rows, drawn, start, upper_bits(0, every=True)) if drawn else None)
    found = "draw"
    drawn, verdict = _draw(trial, rows, range(start, start + calls))
    for name, own in rows.items() if drawn else ():
        verdict = verdict or _ignored(name, own, drawn[name], f"the seeds {start} to {start + calls - 1}")
    if drawn and verdict is None:
        found, verdict = "cut", _cut(trial, rows, drawn, start, upper_bits(state.cases, every=sure))
    if drawn and verdict is None:
        state.draws += most * calls
        found, verdict = "statistic", _of_more_draws(trial, rows, drawn, start, calls)
    state.found = state.found if verdict is None else found
    return verdict


def _of_more_draws(
    trial: Trial, rows: dict[str, _Rows], before: dict[str, torch.Tensor], start: int, calls: int
) -> Verdict | None:
    """The verdict of later seeds, which alone decide where the draws ``before`` them looked odd."""
    state = trial.context.state(_State)
    odd = [_odd(trial, name, own, before[name], state) for name, own in rows.items()]
    if not (any(odd) or trial.context.complete):
        return None
    for _ in range(_ROUNDS):
        start, calls = start + calls, calls * _MORE
        drawn, verdict = _draw(trial, rows, range(start, start + calls))
        if not drawn:
            return verdict
        found = [_misfit(trial, name, own, drawn[name], start) for name, own in rows.items()]
        verdict = next((v for v, _ in found if v is not None), None)
        if verdict is not None or min(p for _, p in found) >= _ODD:
            return verdict
    return None


def _draw(trial: Trial, rows: dict[str, _Rows], seeds: Sequence[int]) -> tuple[dict[str, torch.Tensor], Verdict | None]:
    """Draws by output, ``(calls, draws)``; nothing where a call raises, a verdict where a draw is impossible."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in rows}
    for seed in seeds:
        context, logical = reseeded(trial.context, trial.logical, seed)
        outcome, placed = call(context, trial.result.case, logical, FILLS[0])
        if outcome.error is not None:
            return {}, None
        got = trial.collect(outcome, placed).tensors
        for name, own in rows.items():
            verdict = _impossible(trial, name, own, got[name])
            if verdict is not None:
                return {}, verdict
            found[name].append(got[name].detach().reshape(-1).to(torch.int64).clone())
    return {name: torch.stack(drawn) for name, drawn in found.items()}, None


def _cut(
    trial: Trial, rows: dict[str, _Rows], drawn: dict[str, torch.Tensor], start: int, bits: Sequence[int]
) -> Verdict | None:
    """The failure of a seed that differs in one of these bits and draws the same as the first of ``drawn``."""
    for bit in bits:
        seed = start ^ (1 << bit)
        other, verdict = _draw(trial, rows, [seed])
        for name, own in rows.items() if other else ():
            both = torch.cat([drawn[name][:1], other[name]])
            seeds = f"the seeds {start} and {seed}, which differ in bit {bit} alone,"
            verdict = verdict or _ignored(name, own, both, seeds)
        if verdict is not None:
            return verdict
    return None


def _ignored(name: str, rows: _Rows, drawn: torch.Tensor, seeds: str) -> Verdict | None:
    """The failure of these ``seeds`` drawing the same, if the probabilities make that unlikely."""
    if bool((drawn != drawn[:1]).any()):
        return None
    own = _of(rows.p, drawn[0])[rows.sound]
    likely = float(own.log().sum()) * (len(drawn) - 1)
    if likely >= math.log(_ALPHA / _LOOKS):
        return None
    return failed(
        "repeat",
        f"{seeds} draw the same {name}, which has a probability of about "
        f"1e{round(likely / math.log(10))}: the seed does not reach the random numbers",
        identity="repeat:rng-seed",
        cause="seed-ignored",
        output=name,
    )


def _tests(trial: Trial, name: str, rows: _Rows, drawn: torch.Tensor) -> Iterator[tuple[_Key, torch.Tensor]]:
    """The counts of every G-test: by order of the vocabulary and number of parts."""
    for order in _ORDERS:
        places = _places(rows, drawn, order, counter_random.mix(trial.result.case.seed, "places", order)).flatten()
        for bins in _BINS:
            if len(places) >= bins * _DRAWS_PER_BIN:
                counts = torch.bincount((places * bins).long().clamp(0, bins - 1), minlength=bins)
                yield (name, order, bins), counts


def _fit(counts: torch.Tensor) -> chance.Fit:
    fit = chance.g_test(counts, torch.ones_like(counts))
    assert fit is not None
    return fit


def _odd(trial: Trial, name: str, rows: _Rows, drawn: torch.Tensor, state: _State) -> bool:
    """Whether the draws of this case, or of all so far, justify more calls."""
    odd = _ignored(name, rows, drawn, "") is not None or _company(rows, drawn, trial)[1] < _ODD
    for key, counts in _tests(trial, name, rows, drawn):
        pooled = state.counts[key] = counts + state.counts.get(key, 0)
        odd |= min(_fit(counts).p, _fit(pooled).p) < _ODD
    return odd


def _company(rows: _Rows, drawn: torch.Tensor, trial: Trial) -> tuple[float, float]:
    """How much more the mean place of a call's rows varies than for independent rows, and that probability."""
    places = _places(rows, drawn, _ORDERS[1], counter_random.mix(trial.result.case.seed, "company"))
    count = places.shape[1]
    # A sum of few uniform numbers has lighter tails than the normal law, which is safe here.
    if count < _FEWEST_ROWS:
        return 1.0, 1.0
    squares = (places.sum(-1) - count / 2).square() / (count / 12)
    return float(squares.mean()), chance.chi_square_tail(float(squares.sum()), len(squares))


def _misfit(trial: Trial, name: str, rows: _Rows, drawn: torch.Tensor, start: int) -> tuple[Verdict | None, float]:
    """The finding in draws of all seeds, or of each, and their least probability by chance."""
    allowed = _ALPHA / _LOOKS
    spread, p = _company(rows, drawn, trial)
    if p < allowed:
        verdict = failed(
            "values",
            f"the rows of one call draw {name} alike: over {len(drawn)} seeds the mean of their places in the "
            f"probabilities varies {spread:.1f} times as much as that of independent draws (p = {p:.1g} where "
            f"{allowed:.1g} is allowed); rows share their random numbers",
            identity=f"values:rng-rows:{name}",
            cause="biased-sampling",
            output=name,
            spread=spread,
            p=p,
        )
        return verdict, p
    for (_, order, bins), counts in _tests(trial, name, rows, drawn):
        fit = _fit(counts)
        p = min(p, fit.p)
        if fit.p >= allowed:
            continue
        total = int(counts.sum())
        verdict = failed(
            "values",
            f"{total} draws of {name} at the {len(drawn)} seeds from {start} on do not follow the reference's "
            f"probabilities: of {bins} parts of the vocabulary that are equally likely, {order}, some were drawn "
            f"{int(counts.min())} and some {int(counts.max())} times, where {total / bins:.0f} are expected "
            f"(G = {fit.g:.0f} with {fit.freedom} degrees of freedom, p = {fit.p:.1g} where {allowed:.1g} is allowed)",
            identity=f"values:rng-distribution:{name}",
            cause="biased-sampling",
            output=name,
            draws=total,
            counts=counts.tolist(),
            g=fit.g,
            p=fit.p,
        )
        return verdict, p
    return None, p


def _places(rows: _Rows, drawn: torch.Tensor, order: str, seed: int) -> torch.Tensor:
    """A number from 0 to 1 for each draw, uniform if the draws follow ``rows.p``: ``(calls, rows)``."""
    # Random numbers spread a draw over its own probability for an exact law (randomised probability integral
    # transform).
    use = rows.sound & (rows.p.amax(-1) < 1 - _ONE)
    p, picked = rows.p[use], drawn[:, use].T.contiguous()
    p = p / p.sum(-1, keepdim=True)
    if order == _ORDERS[0]:
        falling = p.argsort(dim=-1, descending=True)
        p, picked = p.gather(-1, falling), falling.argsort(dim=-1).gather(-1, picked)
    below, own = (p.cumsum(-1) - p).gather(-1, picked), p.gather(-1, picked)
    return (below + own * counter_random.uniform(tuple(own.shape), seed, own.device)).T


CHECK = Check(NAME, run, due=due, summary=summary, reported=False)
