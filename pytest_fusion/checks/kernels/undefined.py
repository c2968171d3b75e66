"""Hazard `undefined-lanes`: a result depends on what masked-off lanes of loads without ``other`` hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

import torch

from pytest_fusion.checks.context import Context
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.verdict import Verdict, hazard
from pytest_fusion.interpreter.memory.memory_findings import Site
from pytest_fusion.interpreter.memory.undefined_lanes import Fill, masked_fill

# Calls with 0 in all lanes that must agree before a difference is no chance; lines that are tried one by one.
_CHANCES, _MOST_LINES = 3, 8

# A call's results; ``None`` where it raises or leaves its memory.
Results = Mapping[str, torch.Tensor] | None


@dataclass(slots=True)
class _State:
    """The lines whose masked-off lanes reached a result in some case."""

    lines: dict[Site, None] = field(default_factory=dict)


def dependence(context: Context, lines: Sequence[Site], run: Callable[[], Results]) -> Verdict | None:
    """The hazard where ``run`` gives other results with poison in masked-off lanes of ``lines`` than with 0."""

    def under(fill: Fill, line: Site | None = None) -> Results:
        with masked_fill(fill, poisoned=line):
            return run()

    before = under("zero")
    if before is None or any(_differ(before, under("zero")) for _ in range(_CHANCES - 1)):
        return None
    after = under("poison")
    if not _differ(before, after):
        return None
    known = context.state(_State).lines
    reaching = [line for line in lines if line in known]
    reaching = reaching or [line for line in lines[:_MOST_LINES] if _differ(before, under("zero", line))] or [*lines]
    known.update(dict.fromkeys(reaching))
    found = None if after is None else repeat.first_difference(before, after)
    if found is None:
        name, what = "", "the call raises or leaves its memory, depending on"
    else:
        seen = repeat.seen(*found)
        name, what = seen.output, f"{seen}, the first at {seen.first}, depend on"
    where = ", ".join(f"`{line.code}` ({PurePath(line.file).name}:{line.line})" for line in reaching)
    return hazard(
        "bounds",
        "undefined-lanes",
        f"{what} what the masked-off lanes of a load without other= hold, by {where}: 0 in NVIDIA's code today, "
        "undefined in Triton; write other=0.0",
        identity=f"bounds:undefined-lanes:{reaching[0].kernel}:{reaching[0].line}",
        output=name,
        lines=[[line.kernel, PurePath(line.file).name, line.line, line.code] for line in reaching],
    )


def _differ(before: Mapping[str, torch.Tensor], after: Results) -> bool:
    return after is None or repeat.first_difference(before, after) is not None
