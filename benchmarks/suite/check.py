"""Every way of every row at small sizes, compared with the row's truth: on the CPU kernels are interpreted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.suite.measure import in_pass, wrong
from benchmarks.suite.model import OURS, Row, Span
from benchmarks.suite.passes import UPSTREAM, upstream_of
from pytest_fusion.case.containers import map_tensors
from pytest_fusion.spec.wording import brief


def disagreements(row: Row, device: torch.device, without: Sequence[str] = ()) -> dict[str, str]:
    """What is wrong with each way of ``row`` at its small sizes, by pass and name; torch.compile is not asked."""
    torch.manual_seed(0)
    problem = row.make(device, **row.small)
    spans: tuple[Span, ...] = ("forward", "both") if row.backward else ("forward",)
    found: dict[str, str] = {}
    for span in spans:
        inputs = dict(problem.inputs)
        if span == "both":
            inputs[UPSTREAM] = upstream_of(problem.ours, inputs, problem.grads)
        truth: Any = None
        ways = problem.ways()
        for name in sorted(ways, key=lambda each: each != problem.truth):
            if name in without and name not in (OURS, problem.truth):
                continue
            given = {key: map_tensors(value, torch.Tensor.clone) for key, value in inputs.items()}
            try:
                result = in_pass(ways[name].call, problem, span)(**given)
            except Exception as error:  # noqa: BLE001 -- any way may raise anything
                found[f"{span}, {name}"] = brief(error)
                continue
            truth = result if name == problem.truth else truth
            if not ways[name].part and (why := wrong(problem, span, inputs, result, truth)):
                found[f"{span}, {name}"] = why
    return found
