"""Cross-entropy over large vocabularies."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.suite.families.made import liger, normal
from benchmarks.suite.model import LIGER, Bar, Problem, Row, Way, Work, bars, moved, over
from reference_kernels.cross_entropy import cross_entropy

SMALL = {"rows": 9, "vocab": 300}


def loss(device: torch.device, rows: int, vocab: int) -> Problem:
    logits = normal(device, rows, vocab)
    target = torch.randint(vocab, (rows,), device=device)
    # Liger computes the gradient forward, where the logits ask for one, and writes it over them.
    of_liger = Way(
        lambda logits, target: liger("cross_entropy", "LigerCrossEntropyFunction")(logits, target, None)[0],
        mutates=("both",),
        plain="it waits for the device",
    )
    return Problem(
        {"logits": logits, "target": target},
        cross_entropy,
        lambda logits, target: F.cross_entropy(logits.float(), target),
        Work(moved(logits)),
        {LIGER: of_liger, "F.cross_entropy, bfloat16": Way(_bfloat16)},
        backward=Work(2 * moved(logits)),
        grads=("logits",),
    )


def _bfloat16(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Without the float32 copy: torch sums in float32 inside, and rounds the loss."""
    return F.cross_entropy(logits, target).float()


ROWS = [
    Row(
        "cross_entropy",
        "8192x131072",
        loss,
        {"rows": 8192, "vocab": 131072},
        SMALL,
        bars(
            Bar("copy", 0.88),
            Bar("us", 568),
            over(eager=3.5, compile=1.2),
            Bar("us", 2000, "both"),
            over("both", eager=3.5, compile=1.2, Liger=1.0),
        ),
        backward=True,
    ),
    Row(
        "cross_entropy",
        "8192x128256",
        loss,
        {"rows": 8192, "vocab": 128256},
        SMALL,
        bars(over(best=0.98), over("both", best=0.98), Bar("us", 1600, "both", goal=True)),
        backward=True,
    ),
]
