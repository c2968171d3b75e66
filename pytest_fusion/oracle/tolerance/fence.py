"""The fence between less accurate and wrong: twice what eager PyTorch in the case's dtype loses.

By row, not by element: a run of the reference in 16 bits is one sample, and FlashAttention's own tests compare the
largest errors of whole tensors. A row's errors together (their root mean square) are held to the same, so that what no
single element shows is wrong from there on, and by no other statistic. The worst of all samples counts, each for
itself: all elements of a row may be off by one number, such as what the probabilities of a softmax add up to.

In float32 eager PyTorch is the reference itself, and another formula has another constant: decays from the difference
of their running sums instead of step by step (up to 10 times, by row, in chunks of gated linear attention), a root by
iteration instead of sorting. Sixteen times is beyond these, and far from TF32, which loses 8,192 times as much.

A gradient is compared as a whole tensor. Where its terms cancel, the reference may have exactly 0 in a row, or in all
of it, of which a formula that subtracts sums has what their rounding leaves: gated linear attention takes the gradient
of its gates from ``q * dq - k * dk`` (arXiv 2312.06635).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_result import OutputLanes
from pytest_fusion.oracle.rounding import U32, U64, D
from pytest_fusion.oracle.tolerance.output_verdict import ValuesVerdict
from pytest_fusion.oracle.tolerance.spread import Spread, spread_of

TIMES = 2.0
_TIMES_WIDE = 16.0
_WIDE = frozenset({torch.float32, D})
# Shorter rows are compared as a whole tensor: a largest error of few is chance.
_ROW = 16
_USUAL = 0.9
# What is exact, of another shape, or not finite where the reference is, has no fence.
_NO_FENCE = frozenset({"exact", "shape", "nonfinite"})


def fenced(
    verdict: ValuesVerdict,
    candidate: Tensor,
    lanes: OutputLanes,
    eager: Callable[[], Tensor | None],
    size: float | None = None,
) -> ValuesVerdict:
    """A failed ``verdict`` with its grade: ``C`` inside of the fence, ``D`` outside.

    ``eager`` gives results (samples, *shape) of the reference op by op in the case's 16-bit dtype, ``None`` where there
    is none: in wider dtypes the reference and its lanes are that, which add up in any order. ``size`` is that of an
    element of a gradient before anything cancels, ``None`` for what is no gradient.
    """
    if verdict.statistic in _NO_FENCE:
        return verdict
    spread, sampled = spread_of(lanes), eager()
    shape = tuple(candidate.shape)
    columns = shape[-1] if size is None and shape and shape[-1] >= _ROW else candidate.numel()
    got = candidate.detach().to(D).reshape(-1)
    cancelled = _TIMES_WIDE * (U64 if candidate.dtype == D else U32) * (size or 0.0)
    error, slack = (t.reshape(-1, columns) for t in (_off(got, spread), spread.step + cancelled))
    lost = _lost(spread, sampled).reshape(-1, *error.shape)
    rms, worst = _rms(lost).max(0)
    most = lost.amax(-1).gather(0, worst[None])[0]
    # One sample of a row may have no element as far off as is usual beside its root mean square.
    usual = (most / rms).nan_to_num(0.0).quantile(_USUAL) * rms
    times = _TIMES_WIDE if sampled is None and candidate.dtype in _WIDE else TIMES
    largest = times * most.maximum(usual).unsqueeze(-1) + slack
    beyond = ((error - largest).amax(-1) > 0) | (_rms(error) > times * rms + _rms(slack))
    if not bool(beyond.any()):
        return replace(verdict, grade="C")
    row = int(beyond.to(torch.int8).argmax())
    theirs = float(most[row])
    return replace(
        verdict, reason=f"{verdict.reason}; eager PyTorch in this dtype is off by {theirs:.3g} there at most"
    )


def _off(values: Tensor, spread: Spread) -> Tensor:
    """Absolute errors, zero where one side is not finite."""
    return (values - spread.centre).abs().nan_to_num(0.0, 0.0, 0.0)


def _lost(spread: Spread, eager: Tensor | None) -> Tensor:
    """The errors (samples, N) of the reference, its lanes and eager PyTorch."""
    sources = [spread.native[None], spread.rounded]
    if eager is not None:
        sources.append(eager.to(spread.dtype).to(D).reshape(eager.shape[0], -1))
    return _off(torch.cat(sources), spread)


def _rms(rows: Tensor) -> Tensor:
    return rows.square().mean(-1).sqrt()
