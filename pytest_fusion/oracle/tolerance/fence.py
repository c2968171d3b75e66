"""The fence between less accurate and wrong: twice what eager PyTorch in the case's dtype loses.

By row, not by element: a run of the reference in 16 bits is one sample, and FlashAttention's own tests compare the
largest errors of whole tensors. A row's errors together (their root mean square) are held to the same, so that what no
single element shows is wrong from there on, and by no other statistic. The worst of all samples counts, each for
itself: all elements of a row may be off by one number, such as what the probabilities of a softmax add up to. Among
many rows some have a sample that is right by chance, or arithmetic that is exact there alone, such as the first steps
of a running sum. So rows compare by rank too, each beside its size: the worst with the worst, the next with the next,
and a few odd rows excuse no others. Attention with queries scaled in 16 bits, over all as accurate as eager PyTorch,
lost twice as much in 2 to 7 % of its rows.

In float32 eager PyTorch is the reference itself, and another formula has another constant: decays from the difference
of their running sums instead of step by step (up to 10 times, by row, in chunks of gated linear attention), a root by
iteration instead of sorting. Sixteen times is beyond these, and far from TF32, which loses 8,192 times as much.

A gradient is compared as a whole tensor. Where its terms cancel, the reference may be exactly 0. A formula that
subtracts sums then leaves their rounding: gated linear attention computes the gradient of its gates from
``q * dq - k * dk`` (arXiv 2312.06635). One that reads the stored result, as the backward of attention does,
leaves the rounding of its dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_result import OutputLanes
from pytest_fusion.oracle.rounding import NARROW, D, unit
from pytest_fusion.oracle.tolerance.floats import GROSS
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
    reference is, is outside but where eager PyTorch's own products overflow; no number is worse than that.
    """
    if verdict.statistic in _NO_FENCE:
        return verdict
    spread, shape = spread_of(lanes), tuple(candidate.shape)
    got = candidate.detach().to(D).reshape(-1)
    sampled = eager()
    samples = got.new_empty(0, len(got)) if sampled is None else sampled.to(spread.dtype).to(D).reshape(-1, len(got))
    # Where the exact result is the same infinity or NaN, no product is the reason.
    alike = (samples == spread.centre) | (samples.isnan() & spread.centre.isnan())
    overflows = (~samples.isfinite() & ~alike).any(0)
    if verdict.statistic == "nonfinite":
        wrong = ~allowed_classes(got, lanes, spread)
        if not bool(overflows[wrong].all()):
            return verdict
    columns = shape[-1] if size is None and shape and shape[-1] >= _ROW else len(got)
    cancelled = (TIMES if candidate.dtype in NARROW else _TIMES_WIDE) * unit(candidate.dtype) * (size or 0.0)
    off_by = _off(got, spread).masked_fill(overflows, 0.0)
    error, slack = (t.reshape(-1, columns) for t in (off_by, spread.step + cancelled))
    lost = _off(torch.cat([spread.native[None], spread.rounded, samples]), spread).reshape(-1, *error.shape)
    off, of_rows, largest_of_rows = _rms(error), _rms(lost), lost.amax(-1)
    rms, worst = of_rows.max(0)
    most = largest_of_rows.gather(0, worst[None])[0]
    # A single sample's largest error may be small beside its root mean square.
    most = most.maximum((most / rms).nan_to_num(0.0).quantile(_USUAL) * rms)
    magnitude = _rms(spread.centre.nan_to_num(0.0, 0.0, 0.0).reshape(-1, columns))
    rms = rms.maximum(_of_rank(of_rows, off, magnitude))
    most = most.maximum(_of_rank(largest_of_rows, error.amax(-1), magnitude))
    times = _TIMES_WIDE if sampled is None and candidate.dtype in _WIDE else TIMES
    largest = times * most.unsqueeze(-1) + slack
    single, together = (error / largest).nan_to_num(0.0).amax(-1), off / (times * rms + _rms(slack))
    beyond = single.maximum(together.nan_to_num(0.0))
    row = int(beyond.argmax())
    if float(beyond[row]) <= 1:
        return replace(verdict, grade="C")
    by_one = f"eager PyTorch in this dtype is off by {float(most[row]):.3g} there at most"
    by_all = f"this row is off by {float(off[row]):.3g} (root mean square), eager PyTorch by {float(rms[row]):.3g}"
    # All errors of a row may follow from one rounding, and so may eager PyTorch's: twice as much is no rare chance.
    chance = verdict.statistical or (verdict.statistic != "nonfinite" and float(beyond[row]) <= GROSS)
    reason = f"{verdict.reason}; {by_one if float(single[row]) > 1 else by_all}"
    return replace(verdict, statistical=chance, reason=reason)


def _of_rank(lost: Tensor, error: Tensor, size: Tensor) -> Tensor:
    """What the row of the same rank loses in the usual sample, for rows by their ``error`` beside their ``size``."""
    shares = (lost / size).nan_to_num(0.0, 0.0, 0.0).sort(-1, descending=True).values.median(0).values
    order = (error / size).nan_to_num(0.0, 0.0, 0.0).argsort(descending=True)
    return torch.empty_like(shares).scatter_(0, order, shares) * size


def _off(values: Tensor, spread: Spread) -> Tensor:
    """Absolute errors; zero where either side is not finite."""
    return (values - spread.centre).abs().nan_to_num(0.0, 0.0, 0.0)


def _rms(rows: Tensor) -> Tensor:
    return rows.square().mean(-1).sqrt()
