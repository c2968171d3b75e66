"""A project of somebody who uses the plugin: a test file, a run, and what the run reported."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import settings

from tests.forked import run_pytest

HEAD = """
import pytest
import torch
from hypothesis import example, seed, settings, strategies as st
from pytest_fusion import (
    FusionError, FusionFailure, FusionSpec, SpecError, check_equivalent, dim, fused_equivalent, optional, tensor, values
)

few = settings(max_examples=4)
X = {"x": tensor("rows hidden")}

def relu_reference(x):
    return torch.relu(x)

def relu(x):
    return torch.clamp_min(x, 0)

def wrong(x):  # of another dtype: shrunk and explained in 0.03 s, wrong values in 1
    return torch.relu(x).double()
"""


@dataclass
class Project:
    """One test file and its runs, on the CPU lane."""

    pytester: pytest.Pytester

    def write(self, code: str, name: str = "test_it") -> None:
        self.pytester.makepyfile(**{name: HEAD + code})

    def run(self, *options: str, subprocess: bool = False, fork: bool = False, first: bool = True) -> pytest.RunResult:
        """A run in this process; in a fork of it, whose state is its own; or in a process that begins with nothing.

        Tests end at their first failure, unless not ``first``.
        """
        run = self.pytester.runpytest_subprocess if subprocess else self.pytester.runpytest_inprocess
        if fork:
            run = partial(run_pytest, self.pytester)
        device = () if any("fusion-device" in option for option in options) else ("--fusion-device", "cpu")
        ends = ("--fusion-first",) if first else ()
        return run("-p", "no:cacheprovider", *device, *ends, "--fusion-json", "fusion.json", *options)

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.pytester.path / "fusion.json").read_text())
        return report

    @property
    def tests(self) -> dict[str, dict[str, Any]]:
        """Records by the node id's part behind the file."""
        return {test["nodeid"].partition("::")[2]: test for test in self.report["tests"]}

    @property
    def verdicts(self) -> dict[str, str]:
        return {name: test["verdict"] for name, test in self.tests.items()}


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    for name in ("GITHUB_STEP_SUMMARY", "PYTEST_ADDOPTS", "HYPOTHESIS_STORAGE_DIRECTORY", "CI"):
        monkeypatch.delenv(name, raising=False)
    # Runs in this process set it for good.
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    profile = settings.get_current_profile_name()
    yield Project(pytester)
    settings.load_profile(profile)
