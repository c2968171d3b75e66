"""The public interface means the same to a type checker as to Python."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_fusion

ROOT = Path(__file__).resolve().parent.parent.parent

USER = """
from typing import assert_type

import torch
from torch import Tensor

from pytest_fusion import (
    FusionFailure, FusionSpec, Tolerance, canary, check_equivalent, derived, dim, fused_equivalent, optional, tensor,
    values
)
from pytest_fusion.canary import Canary, Policy, Recorder


def reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x


@fused_equivalent(
    reference,
    inputs={
        "x": tensor("*batch hidden", values=values.normal(), layouts=["contiguous", "padded"]),
        "weight": optional(tensor("hidden", dtype=torch.float32)),
        "eps": 1e-6,
        "index": derived(lambda x: x.argmax(-1)),
    },
    dims={"hidden": dim(1, 8192, multiple_of=8)},
    dtypes=[torch.float32, torch.bfloat16],
    grad=True,
    invariant="batch",
    rejects=ValueError,
    tolerance=Tolerance(rtol=1e-3),
    without={"repeat": "atomics"},
    requires=(9, 0),
)
def test_it(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x


SPEC = FusionSpec(fused=reference, reference=reference, inputs={"x": tensor("rows")}, max_launches=1)
assert_type(SPEC.name, str)
assert_type(SPEC.with_(name="other"), FusionSpec)
test_spec = SPEC.test()
record = check_equivalent(reference, reference, torch.ones(3), None, eps=1e-6)
assert_type(record.cases, int)
kernel = canary("norm", incumbent=reference, candidate=reference, policy=Policy(), spec=SPEC)
assert_type(kernel, Canary)
assert_type(canary.record("norm", reference, "recordings", tensors=True), Recorder)
try:
    test_spec()
except FusionFailure as failure:
    assert_type(failure.check, str)
    assert_type(failure.cause, str | None)
    assert_type(failure.replay, str | None)
"""
MISUSE = """
import torch

from pytest_fusion import FusionSpec, canary, dim, tensor

tensor(3.5)
tensor("rows", layouts=4)
dim("rows")
FusionSpec(lambda x: x, lambda x: x, {"x": tensor("rows")})
FusionSpec(fused=torch.relu, reference=torch.relu, inputs={}, max_launches="one")
canary("norm", incumbent=torch.relu)
canary.record("norm", torch.relu, 5)
"""


def _mypy(folder: Path, **files: str) -> dict[str, set[int]]:
    """The lines with errors of each file, under mypy --strict."""
    for name, code in files.items():
        (folder / f"{name}.py").write_text(code)
    options = ("--strict", "--python-version", "3.11", "--no-error-summary", "--follow-imports=silent")
    # A cache of its own, or this run and a developer's would undo each other's.
    cache = ("--cache-dir", str(ROOT / ".mypy_cache" / "typing-tests"), "--config-file", "")
    command = [sys.executable, "-m", "mypy", *options, *cache, *(f"{name}.py" for name in files)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = re.findall(r"^(\w+)\.py:(\d+): error", done.stdout, re.MULTILINE)
    return {name: {int(line) for file, line in found if file == name} for name in files}


def test_the_interface_is_complete() -> None:
    """Every public name exists and is listed, for people and for `from pytest_fusion import *`."""
    assert set(pytest_fusion.__all__) <= set(dir(pytest_fusion))
    for name in pytest_fusion.__all__:
        assert getattr(pytest_fusion, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'fused_equivalant'"):
        pytest_fusion.fused_equivalant  # noqa: B018
    assert (Path(pytest_fusion.__file__).parent / "py.typed").is_file()


def test_the_canary_is_a_folder_and_a_function() -> None:
    """What the checker is told of ``canary`` is there: it is called, and has ``record``, from either import."""
    from pytest_fusion import canary
    from pytest_fusion.canary import entry
    from pytest_fusion.canary.live import router
    from pytest_fusion.canary.recording import recorder

    assert callable(canary)
    assert canary.record is recorder.record
    assert (entry.canary.__call__, entry.canary.record) == (router.canary, recorder.record)


@pytest.mark.slow
def test_use_passes_and_misuse_does_not(tmp_path: Path) -> None:
    """Under mypy --strict a user's file has no error, and each line of one with wrong arguments has one."""
    pytest.importorskip("mypy")

    found = _mypy(tmp_path, right=USER, wrong=MISUSE)

    first = MISUSE.splitlines().index("tensor(3.5)") + 1
    assert found == {"right": set(), "wrong": set(range(first, first + 7))}
