"""The fence between less accurate and wrong: twice what eager PyTorch in the case's dtype loses.

It compares rows, not elements: a run of the reference in 16 bits is one sample, and FlashAttention's own tests compare
the largest errors of whole tensors. A row's root mean square is limited too, and catches what no single element shows.
The worst sample counts, as all elements of a row may share an error, such as the sum of a softmax's probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_result import OutputLanes
from pytest_fusion.oracle.rounding import D
from pytest_fusion.oracle.tolerance.output_verdict import ValuesVerdict
from pytest_fusion.oracle.tolerance.spread import Spread, spread_of

TIMES = 2.0
# Shorter rows are compared as a whole tensor, since the largest of few errors is chance.
_ROW = 16
_USUAL = 0.9
# No fence applies to exact values, another shape, or non-finite values where the reference is finite.
_NO_FENCE = frozenset({"exact", "shape", "nonfinite"})


def fenced(
    verdict: ValuesVerdict, candidate: Tensor, lanes: OutputLanes, eager: Callable[[], Tensor | None]
) -> ValuesVerdict:
    """A failed ``verdict`` with its grade: ``C`` inside of the fence, ``D`` outside.

    ``eager`` returns results (samples, *shape) of the reference op by op in the case's 16-bit dtype. ``None``: the
    dtype is wider, and the reference and its lanes, in any order of addition, serve as samples.
    """
    if verdict.statistic in _NO_FENCE:
        return verdict
    spread = spread_of(lanes)
    shape = tuple(candidate.shape)
    columns = shape[-1] if shape and shape[-1] >= _ROW else candidate.numel()
    got = candidate.detach().to(D).reshape(-1)
    error, step = (t.reshape(-1, columns) for t in (_off(got, spread), spread.step))
    lost = _lost(spread, eager()).reshape(-1, *error.shape)
    rms, worst = _rms(lost).max(0)
    most = lost.amax(-1).gather(0, worst[None])[0]
    # A single sample's largest error may be small beside its root mean square.
    usual = (most / rms).nan_to_num(0.0).quantile(_USUAL) * rms
    largest = TIMES * most.maximum(usual).unsqueeze(-1) + step
    beyond = ((error - largest).amax(-1) > 0) | (_rms(error) > TIMES * rms + _rms(step))
    if not bool(beyond.any()):
        return replace(verdict, grade="C")
    row = int(beyond.to(torch.int8).argmax())
    theirs = float(most[row])
    return replace(
        verdict, reason=f"{verdict.reason}; eager PyTorch in this dtype is off by {theirs:.3g} there at most"
    )


def _off(values: Tensor, spread: Spread) -> Tensor:
    """Absolute errors; zero where either side is not finite."""
    return (values - spread.centre).abs().nan_to_num(0.0, 0.0, 0.0)


def _lost(spread: Spread, eager: Tensor | None) -> Tensor:
    """The errors (samples, N) of the reference, its lanes and eager PyTorch."""
    sources = [spread.native[None], spread.rounded]
    if eager is not None:
        sources.append(eager.to(spread.dtype).to(D).reshape(eager.shape[0], -1))
    return _off(torch.cat(sources), spread)


def _rms(rows: Tensor) -> Tensor:
    return rows.square().mean(-1).sqrt()
