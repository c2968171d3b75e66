"""AdamW on many tensors: a model of a billion parameters, and thousands of small ones."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.suite.families.made import normal
from benchmarks.suite.model import Bar, Problem, Row, Way, Work, bars, over
from reference_kernels.adamw import adamw

_STEP, _RATE, _BETAS, _EPS, _DECAY = 10, 1e-4, (0.9, 0.999), 1e-8, 1e-2
FUSED, LOOP = "fused=True", "a loop over tensors"
_Lists = list[torch.Tensor]


def _torch(**kind: Any) -> Any:
    """``torch.optim.AdamW``'s step without its object, which holds one set of tensors: in place, as all are."""

    def call(parameters: _Lists, gradients: _Lists, first: _Lists, second: _Lists, steps: Any) -> Any:
        from torch.optim.adamw import adamw as step

        step(
            parameters,
            gradients,
            first,
            second,
            [],
            # Before the step it counts; a kernel counts on the device.
            steps if kind.get("fused") else [torch.tensor(float(_STEP - 1)) for _ in parameters],
            **kind,
            amsgrad=False,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            lr=_RATE,
            weight_decay=_DECAY,
            eps=_EPS,
            maximize=False,
        )
        return parameters, first, second

    return call


def _ours(parameters: _Lists, gradients: _Lists, first: _Lists, second: _Lists, steps: Any) -> Any:  # noqa: ARG001
    adamw(parameters, gradients, first, second, _STEP, _RATE, _BETAS, _EPS, _DECAY)
    return parameters, first, second


def update(device: torch.device, tensors: int, elements: int, loop: bool = False) -> Problem:
    """Float32 throughout, 28 bytes a parameter. Samples follow each other on one set of tensors, as steps do."""
    lists = [[normal(device, elements, dtype=torch.float32) for _ in range(tensors)] for _ in range(4)]
    for square in lists[3]:
        square.abs_()
    steps = [torch.tensor(float(_STEP - 1), device=device) for _ in range(tensors)]
    others = {FUSED: Way(_torch(fused=True))}
    if loop:
        others[LOOP] = Way(_torch(foreach=False))
    return Problem(
        {"parameters": lists[0], "gradients": lists[1], "first": lists[2], "second": lists[3], "steps": steps},
        _ours,
        _torch(foreach=True),
        Work(28 * tensors * elements),
        others,
        compiles=None,
        mutates=("forward",),
    )


ROWS = [
    Row(
        "adamw",
        "300 tensors, 1e9 parameters, float32",
        update,
        {"tensors": 300, "elements": 3_333_333},
        {"tensors": 4, "elements": 300},
        bars(Bar("copy", 0.90), Bar("us", 7200), Bar(FUSED, 1.0), over(eager=1.8), Bar("copy", 0.95, goal=True)),
    ),
    Row(
        "adamw",
        "2000 tensors of 1000, float32",
        update,
        {"tensors": 2000, "elements": 1000, "loop": True},
        {"tensors": 5, "elements": 100, "loop": True},
        bars(Bar(LOOP, 10.0), Bar(FUSED, 1.0, goal=True)),
    ),
    Row(
        "adamw",
        "16 tensors of 4096x4096, float32",
        update,
        {"tensors": 16, "elements": 4096 * 4096},
        {"tensors": 2, "elements": 64},
        bars(Bar(FUSED, 1.0), over(best=0.98)),
    ),
]
