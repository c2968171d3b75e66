"""``pytest-fusion configs``: the classes of configs with equal bits, in a file for the launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugin.conftest import Project

TUNED = """
import triton
import triton.language as tl

@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"])
@triton.jit
def kernel(y, x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

@settings(max_examples=30)
@fused_equivalent(lambda x: 2 * x, inputs=X, dtypes="float32")
def test_tuned(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](y, x, x.numel())
    return y

@settings(max_examples=10)
@fused_equivalent(relu_reference, inputs=X)
def test_torch(x):
    return relu_reference(x)
"""


def _run(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest_fusion.plugin.cli", "configs", test, "classes.json"]
    command += ["--", "--fusion-device=cpu", "-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_classes_are_written_with_what_each_config_passes(project: Project) -> None:
    """Both configs of a doubling give equal bits, so they are one class; a test without a tuned kernel has none."""
    pytest.importorskip("triton")
    project.write(TUNED)
    folder = project.pytester.path

    done = _run(folder, "test_it.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "classes.json").read_text())
    ((number, block),) = [
        [(one["number"], one["BLOCK"]) for one in same] for same in found["test_it.py::test_tuned"]["kernel"]
    ]
    assert (number, block) == ((0, 16), (1, 32))
    assert list(found) == ["test_it.py::test_tuned"]

    (folder / "classes.json").unlink()
    done = _run(folder, "test_it.py::test_torch")
    assert done.returncode == 4
    assert "no test of test_it.py::test_torch passed that launches a kernel under triton.autotune" in done.stderr
    assert not (folder / "classes.json").exists()
