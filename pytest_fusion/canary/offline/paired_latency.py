"""Times two kernels in pairs on one GPU, in one process or in two."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from pytest_fusion.bench import latency
from pytest_fusion.bench.baseline.bootstrap import Estimate, block_ratios, estimate
from pytest_fusion.bench.entries import entries
from pytest_fusion.bench.on_device import opened
from pytest_fusion.bench.without_gpu import full_mask
from pytest_fusion.canary.offline.incumbent.incumbent_process import Opponent, Remote, Timed
from pytest_fusion.canary.offline.metric_finding import Timing
from pytest_fusion.canary.recording.recordings import Cases, RecordedCase
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.make import make_inputs
from pytest_fusion.checks.context import Context
from pytest_fusion.errors import CanaryError
from pytest_fusion.oracle.reference import takes
from pytest_fusion.run.measure.launches.count import count
from pytest_fusion.run.measure.timing.alone import alone
from pytest_fusion.run.measure.timing.graph_replay import Replayed
from pytest_fusion.run.measure.timing.pairs import Blocks
from pytest_fusion.run.measure.timing.pairs import Timed as Timer
from pytest_fusion.run.process.worker import WorkerLost
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import brief

# Timed classes of recorded shapes: each has a hundredth of the calls or more, and together nearly all.
_LEAST_SHARE, _MOST_CLASSES, _ENOUGH = 0.01, 16, 0.9
# Allowed log ratio of the same function in two processes; the judge of a rollout has the same limit.
_BETWEEN = 0.01
_NO_SIZES = (
    "the spec has no bench= and there is no recording, and the latency at fuzzed sizes does not matter; name "
    "sizes that occur in bench=, or give canary compare a --recording"
)


class Sized(NamedTuple):
    """A case for a size of production; ``share`` is that of the recorded calls, 0 without a recording."""

    text: str
    case: Case
    share: float = 0.0


@dataclass(slots=True)
class Latencies:
    """The timing of each size, or the ``problem`` that prevents it; ``notes`` qualify the timings."""

    timings: list[Timing] = field(default_factory=list)
    problem: str = ""
    notes: list[str] = field(default_factory=list)


def sizes(spec: FusionSpec, traffic: Cases | None) -> tuple[list[Sized], str]:
    """The sizes to time, classes of shapes in ``traffic`` or sizes of ``bench=``; and why there are none."""
    if traffic is None or not traffic.total:
        return [Sized(entry.text, entry.case) for entry in entries(spec)], "" if spec.bench else _NO_SIZES
    weights: Counter[str] = Counter()
    heaviest: dict[str, RecordedCase] = {}
    for one in traffic.found:
        weights[one.bucket] += one.weight  # type: ignore[assignment]
        if one.bucket not in heaviest or one.weight > heaviest[one.bucket].weight:
            heaviest[one.bucket] = one
    shares = {bucket: weight / traffic.total for bucket, weight in weights.most_common(_MOST_CLASSES)}
    found = [Sized(name, heaviest[name].case, share) for name, share in shares.items() if share >= _LEAST_SHARE]
    covered = sum(one.share for one in found)
    if covered < _ENOUGH:
        return found, (
            f"the classes of shapes that are cases of the spec and of {_LEAST_SHARE:.0%} of the calls or more are "
            f"{covered:.1%} of the recorded calls, and {_ENOUGH:.0%} are needed; the notes list the others"
        )
    return found, ""


def timings(
    candidate: Context, incumbent: Opponent, sized: Sequence[Sized], pulse: Callable[[Case], None] = lambda case: None
) -> Latencies:
    """The latency ratios at all sizes, or only a ``problem`` if one cannot be timed; ``pulse`` gets each next case."""
    device = torch.device("cuda", candidate.device.index or 0)
    cache = opened(device).cache
    found = Latencies()
    with alone(device):
        if isinstance(incumbent, Remote) and sized:
            pulse(sized[0].case)
            found.problem = _differ(candidate, incumbent, sized[0].case, device, cache, found.notes)
        for one in sized:
            if found.problem:
                break
            pulse(one.case)
            try:
                found.timings.append(_timing(candidate, incumbent, one, device, cache))
            except Exception as error:  # noqa: BLE001 - the checks have judged both; here it is a number or none
                found.problem = f"{one.text}: {brief(error)[:200]}"
            _free(incumbent)
    return Latencies(problem=found.problem, notes=found.notes) if found.problem else found


def timer(context: Context, case: Case, what: Timed, device: torch.device, cache: int) -> Replayed:
    """A timer of the kernel of ``bench`` or of its reference at one size. Raises what the call raises."""
    spec = context.spec
    logical = make_inputs(spec, case, device)
    call: Callable[..., Any] = partial(spec.fused, **context.extra)
    with torch.no_grad():
        if what == "reference":
            drawn = {} if spec.random is None else full_mask(spec, case.sizes, call(**logical))
            call = partial(spec.reference, **takes(spec.reference, {**context.extra, **drawn}))
        outputs = call(**logical)
        counts = count(lambda: call(**logical), dict(logical), device)
        return latency.timed(call, logical, outputs, device, cache, counts)[0]


def _timing(candidate: Context, incumbent: Opponent, one: Sized, device: torch.device, cache: int) -> Timing:
    ours = timer(candidate, one.case, "fused", device, cache)
    if isinstance(incumbent, Remote):
        theirs: Timer = incumbent.timer(one.case, "fused")
    else:
        theirs = timer(incumbent.context, one.case, "fused", device, cache)
    blocks = latency.compared(ours, theirs)
    ratio = _ratio(blocks)
    medians = latency.median(blocks.candidate), latency.median(blocks.control)
    return Timing(one.text, ratio.ratio, ratio.low, ratio.high, *medians, share=one.share)


def _differ(
    candidate: Context, incumbent: Remote, case: Case, device: torch.device, cache: int, notes: list[str]
) -> str:
    """Why latencies of two processes cannot be compared, by timing the same reference in both; or empty."""
    try:
        theirs = incumbent.timer(case, "reference")
        if theirs.source != latency.digest(candidate.spec.reference):
            notes.append(
                "the incumbent's reference is another one, so that no equal function could be timed in both processes"
            )
            return ""
        ratio = _ratio(latency.compared(timer(candidate, case, "reference", device, cache), theirs))
    except Exception as error:  # noqa: BLE001 - a reference that cannot be timed is no fault of the kernels
        notes.append(f"no equal function could be timed in both processes: the reference raises {brief(error)[:200]}")
        return ""
    finally:
        _free(incumbent)
    if ratio.high >= -_BETWEEN and ratio.low <= _BETWEEN:
        return ""
    return (
        f"the same reference takes {math.exp(ratio.ratio):.3g} x as long here as in the incumbent's process, and "
        f"{_BETWEEN:.0%} either way is allowed: is another version of torch there? Or is the GPU shared?"
    )


def _ratio(blocks: Blocks) -> Estimate:
    return estimate(block_ratios(blocks.candidate, blocks.control))


def _free(incumbent: Opponent) -> None:
    if isinstance(incumbent, Remote):
        with contextlib.suppress(WorkerLost, CanaryError):  # the next question raises it
            incumbent.untime()
    torch.cuda.empty_cache()
