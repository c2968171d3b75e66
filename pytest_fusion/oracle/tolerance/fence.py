"""The fence between less accurate and wrong: twice what eager PyTorch in the case's dtype loses.

By row, not by element: a run of the reference in 16 bits is one sample, and FlashAttention's own tests compare the
largest errors of whole tensors. A row's errors together (their root mean square) are held to the same, so that what no
single element shows is wrong from there on, and by no other statistic. The worst of all samples counts, each for
itself: all elements of a row may be off by one number, such as what the probabilities of a softmax add up to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_result import OutputLanes
from pytest_fusion.oracle.rounding import D
from pytest_fusion.oracle.tolerance.output_verdict import ValuesVerdict
from pytest_fusion.oracle.tolerance.spread import Spread, allowed_classes, spread_of

TIMES = 2.0
# Shorter rows are compared as a whole tensor: a largest error of few is chance.
_ROW = 16
_USUAL = 0.9
# What is exact, or of another shape, has no fence.
_NO_FENCE = frozenset({"exact", "shape"})


def fenced(
    verdict: ValuesVerdict, candidate: Tensor, lanes: OutputLanes, eager: Callable[[], Tensor | None]
) -> ValuesVerdict:
    """A failed ``verdict`` with its grade: ``C`` inside of the fence, ``D`` outside.

    ``eager`` gives results (samples, *shape) of the reference op by op in the case's 16-bit dtype, ``None`` where there
    is none: in wider dtypes the reference and its lanes are that, which add up in any order. What is not finite where
    the reference is, is outside but where eager PyTorch's own products overflow.
    """
    if verdict.statistic in _NO_FENCE:
        return verdict
    spread, shape = spread_of(lanes), tuple(candidate.shape)
    got = candidate.detach().to(D).reshape(-1)
    found = eager()
    samples = got.new_empty(0, len(got)) if found is None else found.to(spread.dtype).to(D).reshape(-1, len(got))
    if verdict.statistic == "nonfinite":
        wrong = ~allowed_classes(got, lanes, spread)
        if bool(samples.isfinite().all(0)[wrong].any()):
            return verdict
    columns = shape[-1] if shape and shape[-1] >= _ROW else len(got)
    error, step = (t.reshape(-1, columns) for t in (_off(got, spread), spread.step))
    lost = _off(torch.cat([spread.native[None], spread.rounded, samples]), spread).reshape(-1, *error.shape)
    rms, worst = _rms(lost).max(0)
    most = lost.amax(-1).gather(0, worst[None])[0]
    # One sample of a row may have no element as far off as is usual beside its root mean square.
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
    """Absolute errors, zero where one side is not finite."""
    return (values - spread.centre).abs().nan_to_num(0.0, 0.0, 0.0)


def _rms(rows: Tensor) -> Tensor:
    return rows.square().mean(-1).sqrt()
