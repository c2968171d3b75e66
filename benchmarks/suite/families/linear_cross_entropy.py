"""Cross-entropy of a linear layer, whose logits are larger than everything else."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.suite.families.made import liger, normal
from benchmarks.suite.model import LIGER, Bar, Problem, Row, Way, Work, bars, moved, over
from reference_kernels.linear_cross_entropy import linear_cross_entropy

_NARROW = "eager, bfloat16 logits"
_GIB = 1 << 30


def loss(device: torch.device, rows: int, hidden: int, vocab: int, compiled: bool = True) -> Problem:
    x, weight = normal(device, rows, hidden), normal(device, vocab, hidden, scale=hidden**-0.5)
    target = torch.randint(vocab, (rows,), device=device)
    of_liger = liger("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")

    def first(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> Any:
        found = of_liger(x, weight, target)
        return (found[0] if isinstance(found, tuple) else found).float()

    flops = 2 * rows * hidden * vocab
    return Problem(
        {"x": x, "weight": weight, "target": target},
        lambda x, weight, target: linear_cross_entropy(x, weight, target, gradients="forward"),
        lambda x, weight, target: F.cross_entropy(F.linear(x, weight).float(), target),
        Work(moved(x, weight), flops),
        {
            LIGER: Way(first, plain="it waits for the device"),
            _NARROW: Way(lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target).float()),
        },
        backward=Work(2 * moved(x, weight), 2 * flops),
        grads=("x", "weight"),
        compiles="eager" if compiled else None,
    )


def _sizes(vocab: int) -> dict[str, int]:
    return {"rows": 8192, "hidden": 4096, "vocab": vocab}


SMALL = {"rows": 9, "hidden": 32, "vocab": 70}

ROWS = [
    Row(
        "linear_cross_entropy",
        "8192x4096 by 131072",
        loss,
        {**_sizes(131072), "compiled": False},
        SMALL,
        bars(
            Bar(_NARROW, 1 / 1.15, "both"),
            over("both", Liger=2.5),
            # 0.6 GB beside the gradient of the weight.
            Bar("gib", round((600e6 + 2 * 131072 * 4096) / _GIB, 2), "both"),
            Bar("tflops", 500, "both"),
            Bar("tflops", 600, "both", goal=True),
        ),
        backward=True,
    ),
    Row(
        "linear_cross_entropy",
        "8192x4096 by 128256",
        loss,
        _sizes(128256),
        SMALL,
        bars(over("both", compile=1.0), Bar("us", 39600, "both"), Bar("gib", 1.5, "both")),
        backward=True,
    ),
]
