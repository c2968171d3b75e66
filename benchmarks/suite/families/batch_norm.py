"""Batch normalisation of images, alone and with a residual sum and relu."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.suite.families.made import BF16, near_one, normal
from benchmarks.suite.model import Bar, Problem, Row, Work, bars, moved, over
from reference_kernels.batch_norm import batch_norm

_MOMENTUM, _EPS = 0.1, 1e-5
_DTYPES = {"bfloat16": BF16, "float32": torch.float32}


def images(
    device: torch.device,
    batch: int,
    channels: int,
    side: int,
    dtype: str,
    block: bool = False,
    training: bool = True,
    last: bool = False,
) -> Problem:
    """``block``: with the residual and relu of a ResNet; ``last``: channels are neighbours in memory.

    Training reads the input twice, for its statistics and for its result; three passes and not two count, as what is
    between does not stay in the cache. The running statistics move with every call, which changes no work.
    """
    made = _DTYPES[dtype]
    x, residual = (normal(device, batch, channels, side, side, dtype=made) for _ in range(2))
    if last:
        x, residual = (each.to(memory_format=torch.channels_last) for each in (x, residual))
    weight, bias = near_one(device, channels, dtype=torch.float32), normal(device, channels, dtype=torch.float32)
    mean, var = torch.zeros(channels, device=device), torch.ones(channels, device=device)

    def ours(x: Any, weight: Any, bias: Any, mean: Any, var: Any, residual: Any = None) -> Any:
        return batch_norm(
            x, weight, bias, mean, var, training=training, momentum=_MOMENTUM, eps=_EPS, residual=residual, relu=block
        )

    def eager(x: Any, weight: Any, bias: Any, mean: Any, var: Any, residual: Any = None) -> Any:
        y = F.batch_norm(x, mean, var, weight, bias, training, _MOMENTUM, _EPS)
        return torch.relu(y + residual) if block else y

    inputs = {"x": x, "weight": weight, "bias": bias, "mean": mean, "var": var}
    once = moved(x)
    return Problem(
        {**inputs, "residual": residual} if block else inputs,
        ours,
        eager,
        Work((2 + training + block) * once),
        backward=Work((5 + 2 * block) * once),
        grads=("x", "weight", "bias", "residual") if block else ("x", "weight", "bias"),
    )


_SIZES = {"batch": 64, "channels": 256, "side": 56}
_SMALL = {"batch": 4, "channels": 6, "side": 5}


def _row(text: str, wanted: tuple[Bar, ...], backward: bool = True, **more: Any) -> Row:
    return Row("batch_norm", text, images, {**_SIZES, **more}, {**_SMALL, **more}, wanted, backward)


ROWS = [
    *(
        _row(f"64x256x56x56, {dtype}", bars(Bar("copy", 0.75), over(eager=1.0, compile=1.0)), dtype=dtype)
        for dtype in ("bfloat16", "float32")
    ),
    _row(
        "residual, relu, 64x256x56x56, bfloat16",
        bars(Bar("copy", 0.75), over(eager=1.6, compile=1.0)),
        dtype="bfloat16",
        block=True,
    ),
    _row(
        "residual, relu, channels last, 64x256x56x56, bfloat16",
        bars(Bar("copy", 0.75, goal=True), over(eager=1.6)),
        dtype="bfloat16",
        block=True,
        last=True,
    ),
    _row(
        "evaluation, residual, relu, 64x256x56x56, bfloat16",
        bars(Bar("copy", 0.85, goal=True), over(compile=1.0)),
        backward=False,
        dtype="bfloat16",
        block=True,
        training=False,
    ),
]
