"""The fence between less accurate and wrong: twice what eager PyTorch in the case's dtype loses.

By row, not by element: a run of the reference in 16 bits is one sample, and FlashAttention's own tests compare the
largest errors of whole tensors. A row's errors together (their root mean square) are held to the same, so that what no
single element shows is wrong from there on, and by no other statistic. The worst of all samples counts, each for
itself: all elements of a row may be off by one number, such as what the probabilities of a softmax add up to.

In float32 eager PyTorch is the reference itself, and another formula has another constant: decays from the difference
of their running sums instead of step by step (up to 10 times, by row, in chunks of gated linear attention), a root by
iteration instead of sorting. Sixteen times is beyond these, and far from TF32, which loses 8,192 times as much.

A gradient is compared as a whole tensor. Where its terms cancel, the reference may be exactly 0. A formula that
subtracts sums then leaves their rounding: gated linear attention computes the gradient of its gates from
``q * dq - k * dk`` (arXiv 2312.06635).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_result import OutputLanes
from pytest_fusion.oracle.rounding import U32, U64, D
from pytest_fusion.oracle.tolerance.output_verdict import ValuesVerdict
from pytest_fusion.oracle.tolerance.spread import Spread, allowed_classes, spread_of

TIMES = 2.0
_TIMES_WIDE = 16.0
_WIDE = frozenset({torch.float32, D})
# Shorter rows are compared as a whole tensor: a largest error of few is chance.
_ROW = 16
_USUAL = 0.9
# What is exact, or of another shape, has no fence.
_NO_FENCE = frozenset({"exact", "shape"})


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
    element of a gradient before anything cancels, ``None`` for what is no gradient. What is not finite where the
    reference is, is outside but where eager PyTorch's own products overflow.
    """
    if verdict.statistic in _NO_FENCE:
        return verdict
    spread, shape = spread_of(lanes), tuple(candidate.shape)
    got = candidate.detach().to(D).reshape(-1)
    sampled = eager()
    samples = got.new_empty(0, len(got)) if sampled is None else sampled.to(spread.dtype).to(D).reshape(-1, len(got))
    if verdict.statistic == "nonfinite":
        wrong = ~allowed_classes(got, lanes, spread)
        # Where the reference has infinity itself, no product is the reason.
        overflows = spread.native.isfinite() & ~samples.isfinite().all(0)
        if not bool(overflows[wrong].all()):
            return verdict
    columns = shape[-1] if size is None and shape and shape[-1] >= _ROW else len(got)
    cancelled = _TIMES_WIDE * (U64 if candidate.dtype == D else U32) * (size or 0.0)
    error, slack = (t.reshape(-1, columns) for t in (_off(got, spread), spread.step + cancelled))
    lost = _off(torch.cat([spread.native[None], spread.rounded, samples]), spread).reshape(-1, *error.shape)
    rms, worst = _rms(lost).max(0)
    most = lost.amax(-1).gather(0, worst[None])[0]
    # A single sample's largest error may be small beside its root mean square.
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
    """Absolute errors; zero where either side is not finite."""
    return (values - spread.centre).abs().nan_to_num(0.0, 0.0, 0.0)


def _rms(rows: Tensor) -> Tensor:
    return rows.square().mean(-1).sqrt()
