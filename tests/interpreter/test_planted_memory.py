"""Every planted memory bug is found and named at its line, and kernels without one are left in peace."""

from __future__ import annotations

import importlib
import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion import interpreter
from pytest_fusion.errors import MemoryFinding
from pytest_fusion.interpreter import interpreted
from tests.sweeps import sweep

interpreter.enable()
triton = pytest.importorskip("triton")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

PLANTED = "tests.interpreter.planted"
model = importlib.import_module(f"{PLANTED}.model")
_honest = "honest_layouts honest_order honest_alone honest_control"
for _name in f"bounds tiles control gaps races stale unwritten hints {_honest}".split():
    importlib.import_module(f"{PLANTED}.{_name}")
PLANTS: list[Any] = model.PLANTS
KINDS = {
    "out-of-bounds-load",
    "out-of-bounds-store",
    "use-after-free",
    "misaligned-access",
    "gap-store",
    "unwritten-load",
    "racing-stores",
    "racing-load",
    "false-hint",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated"),
    pytest.mark.filterwarnings("ignore:tl.cat.*is deprecated"),
    sweep("executor", ["batched", "serial"]),
]
each_plant = pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{Path(plant.file).stem}-{plant.name}")


def found_in(plant: Any, executor: str) -> list[Any]:
    """The findings of the faulty launch; what it must not touch was not touched."""
    memory = model.Memory()
    with interpreted(executor=executor, findings="collect") as session:
        plant.run(memory, True)
    assert memory.intact(), "the bad access was performed"
    assert session.findings, f"{plant.kernel}: nothing was found"
    return list(session.findings)


@each_plant
def test_a_planted_bug_is_named_at_its_line(plant: Any, executor: str) -> None:
    """The first finding has the right kind, file, line, kernel and argument, and no innocent line is accused."""
    findings = found_in(plant, executor)
    first = findings[0]
    assert first.kind in plant.kinds, str(first)
    assert (Path(first.file), first.kernel, first.argument) == (Path(plant.file), plant.kernel, plant.argument)
    accused = {finding.line for finding in findings}
    assert accused <= plant.lines, [str(finding) for finding in findings]
    assert first.code.strip() == linecache.getline(plant.file, first.line).strip()
    assert plant.kernel in str(first)


@pytest.mark.parametrize("plant", [p for p in PLANTS if p.details], ids=lambda plant: plant.name)
def test_a_finding_says_which_element(plant: Any, executor: str) -> None:
    """Program, offset, index, number of lanes, shape and strides, where the bug leaves no choice."""
    first = found_in(plant, executor)[0]
    assert {name: getattr(first, name) for name in plant.details} == plant.details


@each_plant
def test_the_honest_twin_is_left_in_peace(plant: Any, executor: str) -> None:
    """The same kernel without the bug: no finding, and the right result."""
    check_honest(plant.honest, executor)


@pytest.mark.parametrize("run", model.HONEST, ids=lambda run: run.__name__)
def test_an_honest_kernel_is_left_in_peace(run: Callable[[Any], Any], executor: str) -> None:
    """What a rash checker would accuse: no finding, and the right result."""
    check_honest(run, executor)


def check_honest(run: Callable[[Any], Any], executor: str) -> None:
    """Nothing is found, nothing outside is touched, and the results are those of PyTorch."""
    memory = model.Memory()
    with interpreted(executor=executor, findings="collect") as session:
        pairs = run(memory)
    assert [str(finding) for finding in session.findings] == []
    assert memory.intact()
    assert pairs
    for got, want in pairs:
        torch.testing.assert_close(comparable(got), comparable(want), equal_nan=True)


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """float8 cannot be compared."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


@pytest.mark.parametrize("plant", PLANTS[::8], ids=lambda plant: plant.name)
def test_the_first_finding_can_be_raised(plant: Any, executor: str) -> None:
    """With findings="raise" the launch ends there, and memory is as untouched as otherwise."""
    memory = model.Memory()
    with pytest.raises(MemoryFinding, match=plant.kernel), interpreted(executor=executor, findings="raise"):
        plant.run(memory, True)
    assert memory.intact()


def test_every_kind_is_planted(executor: str) -> None:
    """No kind of finding is without a bug that shows it."""
    assert set().union(*(plant.kinds for plant in PLANTS)) == KINDS
    assert len({(plant.file, plant.name) for plant in PLANTS}) == len(PLANTS) >= 60
