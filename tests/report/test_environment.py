"""The environment is learnt without importing a package and without starting CUDA."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_fusion.report import environment


def test_asking_imports_nothing() -> None:
    """Neither lane's description imports torch, triton, numpy or Hypothesis."""
    code = (
        "import sys; from pytest_fusion.report.environment import describe; describe('cpu'); describe('cuda:0');"
        "print([name for name in ('torch', 'triton', 'numpy', 'hypothesis') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_the_lane_names_what_ran() -> None:
    """A CPU run is the interpreter's, and the versions are those that are installed."""
    import torch

    found = environment.describe("cpu", profile="ci")

    assert found["lane"] == "cpu-interpreter"
    assert torch.__version__.startswith(found["torch"])  # metadata may leave the local part out
    assert found["device_name"]
    assert found["profile"] == "ci"


def test_a_package_that_is_missing_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton need not be installed."""

    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("importlib.metadata.version", version)

    assert environment.describe()["triton"] is None


def test_a_started_cuda_is_asked_for_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this process runs CUDA already, torch's own name of that very device is used."""
    cuda = SimpleNamespace(is_initialized=lambda: True, get_device_name=lambda device: f"name of {device}")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="13.0")))

    found = environment.describe("cuda:1")

    assert (found["lane"], found["device_name"], found["cuda"]) == ("cuda", "name of cuda:1", "13.0")


def test_the_driver_is_read_where_cuda_was_not_started(tmp_path: Path) -> None:
    """Model and version come from the driver's own files."""
    for bus in ("0000:1b:00.0", "0000:43:00.0"):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
        (tmp_path / "gpus" / bus / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\n")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: gcc 12\n"
    )

    assert environment.nvidia_name(tmp_path) == "NVIDIA H200"
    assert environment.driver_version(tmp_path) == "580.65.06"


def test_a_machine_without_a_driver_has_neither(tmp_path: Path) -> None:
    """Missing files are None, and the processor falls back to its architecture."""
    assert environment.nvidia_name(tmp_path / "none") is None
    assert environment.driver_version(tmp_path / "none") is None
    assert environment.cpu_name(tmp_path / "none")
