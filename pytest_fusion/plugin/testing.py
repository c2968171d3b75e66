"""Helpers for tests of kernels and of this package: judge a spec without pytest."""

from __future__ import annotations

from pathlib import Path

from pytest_fusion.run import device_choice

# Before anything here imports torch: its CUDA build imports Triton, and then it is too late for the interpreter.
device_choice.prepare(device_choice.choose("auto"))

from pytest_fusion import interpreter  # noqa: E402
from pytest_fusion.case.choosing import search as searching  # noqa: E402
from pytest_fusion.engine.job import Job  # noqa: E402
from pytest_fusion.engine.modes import Judge  # noqa: E402
from pytest_fusion.engine.profiles import profile as profile_named  # noqa: E402
from pytest_fusion.engine.request import Request  # noqa: E402
from pytest_fusion.report.record import TestRecord  # noqa: E402
from pytest_fusion.spec.fusion_spec import FusionSpec  # noqa: E402


def examine(
    spec: FusionSpec,
    *,
    seed: int = 0,
    profile: str = "dev",
    isolate: str = "auto",
    device: str = "cpu",
    max_cases: int | None = None,
    first: bool = False,
    root: Path | None = None,
) -> TestRecord:
    """The record of all checks on all cases of ``spec``. Raises ``SpecError`` for a spec that contradicts itself.

    ``seed`` decides every random choice; ``max_cases`` bounds the cases, and ``first`` ends them at the first failure;
    replay files are written below ``root``.
    """
    if device == "cpu":
        interpreter.enable()
    request = Request(
        nodeid=spec.name,
        device=device,
        profile=profile_named(profile),
        isolate=isolate,
        root=root or Path.cwd(),
        seed=seed,
        max_cases=max_cases,
        first=first,
    )
    return Judge().run(Job(spec, request, searching.stand_in(), {}))
