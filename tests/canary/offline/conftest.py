"""A duel of two kernels of `kernels`, in this process, without pytest in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pytest

from pytest_fusion.canary.offline.comparison_mode import Compare
from pytest_fusion.canary.offline.incumbent.incumbents import Incumbent, IncumbentName, Setting
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.request import Request
from pytest_fusion.report.record import TestRecord
from tests.canary.offline import kernels


class Duels(Protocol):
    def __call__(
        self, candidate: Any, incumbent: Any, *, cases: int = 30, without: Any = ..., **spec: Any
    ) -> TestRecord: ...


@pytest.fixture
def duel(tmp_path: Path) -> Duels:
    def run(
        candidate: Any,
        incumbent: Any,
        *,
        cases: int = 30,
        without: Any = ("launches", "memory", "latency"),
        isolate: str = "off",
        pinned: Any = (),
        recording: Path | None = None,
        **spec: Any,
    ) -> TestRecord:
        def outer() -> None: ...

        searching.adopt(outer, outer)
        named = IncumbentName("function", f"{kernels.__name__}:{incumbent.__name__}")
        rival = Incumbent(named, Setting(tmp_path, tmp_path, "cpu"), without=without, recording=recording)
        request = Request(
            "it.py::test_it",
            isolate=isolate,
            root=tmp_path,
            start=tmp_path,
            max_cases=cases,
            pinned=pinned,
        )
        return Compare(rival).run(Job(kernels.SPEC.with_(fused=candidate, **spec), request, outer, {}))

    return run
