"""`ReferenceRuns`: further runs of the reference on a case's inputs, each made when first read."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pytest_fusion.case import counter_random
from pytest_fusion.checks import values_check
from pytest_fusion.checks.context import CaseResult, Context, collect, reader
from pytest_fusion.errors import SpecError
from pytest_fusion.oracle import OutputLanes
from pytest_fusion.oracle.reference import ReferenceFailed, ReferenceRun, run_reference
from pytest_fusion.oracle.rounding import factors_in_tf32
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.placing import place


@dataclass(slots=True)
class ReferenceRuns:
    """Runs with more random roundings, on inputs in their layouts, and in eager 16 bits."""

    context: Context
    result: CaseResult
    logical: Mapping[str, Any]
    reference: ReferenceRun
    _lanes: dict[tuple[int, str, bool], dict[str, OutputLanes]] = field(default_factory=dict)
    _laid: dict[str, OutputLanes] | None = None
    _eager: dict[str, torch.Tensor] | None = None

    def fresh_lanes(self, name: str, count: int, kind: Literal["E", "F"]) -> OutputLanes:
        """Lanes of one output from another run of the reference, which serves all outputs."""
        key = (count, kind, factors_in_tf32())
        if key not in self._lanes:
            self._lanes[key] = self._priced("fresh lanes", count, kind)
        return self._lanes[key][name]

    def laid_lanes(self, name: str, count: int) -> OutputLanes | None:
        """Lanes from the reference on inputs in their layouts; ``None`` if contiguous, refused or read otherwise."""
        # ``F.linear`` rounds once more before it adds a strided bias, unless ``x`` is a matrix.
        if self._laid is None:
            self._laid = {}
            placed = place(self.logical, self.result.case, self.context.device, FILLS[0])
            if not all(t.is_contiguous() for t in placed.tensors.values()):
                with contextlib.suppress(ReferenceFailed, SpecError):
                    self._laid = self._priced("laid lanes", count, "E", laid=placed.arguments)
        if name not in self._laid:
            return None
        return values_check.meant_alike(self.fresh_lanes(name, count, "E"), self._laid[name])

    def eager(self, name: str) -> torch.Tensor | None:
        """The reference's result in eager 16 bits for one output; ``None`` where no input has 16 bits."""
        if self._eager is None:
            runs: list[ReferenceRun] = []

            def once() -> list[torch.Tensor]:
                context = self.context
                read = reader(context.spec)
                runs.append(run_reference(context.spec, self.logical, context.extra, read, lanes=0, seed=0))
                return runs[-1].native

            with self.context.clock.phase("reference"):
                seed = counter_random.mix(self.result.case.seed, "eager")
                self._eager = values_check.eager_of(once, lambda: self._names(runs[-1]), seed)
        return self._eager.get(name)

    def _names(self, run: ReferenceRun) -> list[str]:
        return list(collect(run.result, run.arguments, self.context.spec.mutates).tensors)

    def _priced(
        self, salt: str, count: int, kind: Literal["E", "F"], *, laid: Mapping[str, Any] | None = None
    ) -> dict[str, OutputLanes]:
        with self.context.clock.phase("reference"):
            run = run_reference(
                self.context.spec,
                self.logical,
                self.context.extra,
                reader(self.context.spec),
                lanes=count,
                kind=kind,
                seed=counter_random.mix(self.result.case.seed, salt, count, kind),
                limit_s=self.context.reference_s,
                laid=laid,
                numbers=self.reference.numbers,
            )
        return dict(zip(self._names(run), run.lanes, strict=True))
