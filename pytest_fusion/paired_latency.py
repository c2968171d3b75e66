"""The latency of two kernels in one process on a GPU, in pairs that take turns, at the sizes of ``bench=``."""

from __future__ import annotations

from functools import partial

import torch

from pytest_fusion.baseline.bootstrap import block_ratios, estimate
from pytest_fusion.bench import latency
from pytest_fusion.bench.entries import Entry, entries
from pytest_fusion.bench.on_device import opened
from pytest_fusion.canary.offline.findings import Timing
from pytest_fusion.case.make import make_inputs
from pytest_fusion.errors import said
from pytest_fusion.run.counting.count import count
from pytest_fusion.run.timing.alone import alone
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.verdict.calls import Bench


def timings(candidate: FusionSpec, incumbent: FusionSpec, bench: Bench) -> tuple[list[Timing], str]:
    """log(candidate / incumbent) at each size, and why there is none where there is none.

    A size that one of them does not bear is no size; where none is left, its reason is told.
    """
    named = entries(candidate)
    if not named:
        return [], "the spec has no bench=, and latencies of fuzzed sizes are nobody's; name the sizes that occur"
    device = torch.device("cuda", bench.device.index or 0)
    cache = opened(device).cache
    found: list[Timing] = []
    problem = ""
    with alone(device):
        for entry in named:
            try:
                found.append(_timing(candidate, incumbent, entry, bench, device, cache))
            except Exception as error:  # noqa: BLE001 - the checks have judged both; here it is a number or none
                problem = f"{entry.text}: {said(error)[:200]}"
            torch.cuda.empty_cache()
    return ([], problem) if problem else (found, "")


def _timing(
    candidate: FusionSpec, incumbent: FusionSpec, entry: Entry, bench: Bench, device: torch.device, cache: int
) -> Timing:
    logical = make_inputs(candidate, entry.case, device)
    timed = []
    with torch.no_grad():
        for spec in (candidate, incumbent):
            fused = partial(spec.fused, **bench.extra)
            outputs = fused(**logical)
            counts = count(lambda fused=fused: fused(**logical), dict(logical), device)  # type: ignore[misc]
            timed.append(latency.timed(fused, logical, outputs, device, cache, counts)[0])
    blocks = latency.compared(*timed)
    ratio = estimate(block_ratios(blocks.candidate, blocks.control))
    medians = latency.median(blocks.candidate), latency.median(blocks.control)
    return Timing(entry.text, ratio.ratio, ratio.low, ratio.high, *medians)
