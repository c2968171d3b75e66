"""Kernels written to break the CPU lane: honest ones that a checker would accuse, and bugs that it would overlook."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pytest_fusion import interpreter
from pytest_fusion.interpreter import interpreted
from pytest_fusion.interpreter.memory.atomic_order import Order
from pytest_fusion.run.fused import Described
from pytest_fusion.run.memory.arena import Arena

interpreter.enable()
pytest.importorskip("triton")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

FOLDER = "tests.interpreter"
model = importlib.import_module(f"{FOLDER}.planted.model")
cases = importlib.import_module(f"{FOLDER}.adversarial.cases")
for _name in ("synchronised", "flow", "styles", "wrong"):
    importlib.import_module(f"{FOLDER}.adversarial.{_name}")


def name(case: Any) -> str:
    """Of a parametrised case."""
    return f"{case.run.__name__}-{case.executor}"


@pytest.mark.parametrize("case", cases.HONEST, ids=name)
def test_an_honest_kernel_is_not_accused(case: Any) -> None:
    """No finding, nothing outside touched, and what PyTorch computes."""
    memory = model.Memory(1 << 19)
    with interpreted(executor=case.executor, findings="collect") as session:
        pairs = case.run(memory)
    assert [str(finding) for finding in session.findings] == []
    assert memory.intact()
    assert pairs
    for got, want in pairs:
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("case", cases.BUGS, ids=name)
def test_a_bug_is_found_at_its_line(case: Any) -> None:
    """The first finding has the kind and the line, and no other line is accused."""
    memory = model.Memory(1 << 19)
    with interpreted(executor=case.executor, findings="collect") as session:
        case.run(memory)
    assert memory.intact()
    assert session.findings, "nothing was found"
    assert session.findings[0].kind in case.kinds
    assert {finding.line for finding in session.findings} <= case.lines, [str(f) for f in session.findings]


def acquire_release(order: Order, address: int, *programs: int, acquire: bool = True, release: bool = True) -> None:
    """One atomic by each program."""
    addresses = np.full(len(programs), address)
    order.atomic(addresses, np.array(programs), acquire=acquire, release=release)


def before(order: Order, first: int, since: int, second: int) -> bool:
    """``Order.ordered`` of one lane."""
    return bool(order.ordered(*(np.array([n]) for n in (first, since, second)))[0])


def test_order_goes_through_a_third_program_but_not_back_in_time() -> None:
    """1 gives to 2, 2 gives to 3: 3 knows what 1 did before, not what it did after its release."""
    order = Order()
    early = order.now()
    acquire_release(order, 8, 1, acquire=False)
    late = order.now()
    acquire_release(order, 8, 2, release=False)
    acquire_release(order, 16, 2, acquire=False)
    assert not before(order, 1, early, 3)
    acquire_release(order, 16, 3, release=False)
    assert before(order, 1, early, 3)
    assert not before(order, 1, late, 3)
    assert not before(order, 3, early, 1)


def test_what_a_program_passed_on_before_it_learned_is_not_passed_on() -> None:
    """2 releases to 3 first, and hears of 1 only then."""
    order = Order()
    early = order.now()
    acquire_release(order, 8, 1, acquire=False)
    acquire_release(order, 16, 2, acquire=False)
    acquire_release(order, 16, 3, release=False)
    acquire_release(order, 8, 2, release=False)
    assert before(order, 1, early, 2)
    assert not before(order, 1, early, 3)


def test_each_release_is_looked_at_once_for_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand programs on a thousand flags took minutes when each question went through all of them."""
    programs = 1000
    order, looked = Order(), []
    since = order.now()
    upstream = Order._learn

    def learn(self: Order, known: Any, address: int, count: int) -> Any:
        new = upstream(self, known, address, count)
        looked.append(len(new))
        return new

    monkeypatch.setattr(Order, "_learn", learn)
    for program in range(1, programs):
        acquire_release(order, 8 * program, program, acquire=False)
        acquire_release(order, 8 * program, program + 1, release=False)
    first, second = np.arange(1, programs), np.arange(2, programs + 1)
    for _ in range(3):
        assert order.ordered(first, np.array([since]), second).all()
    assert sum(looked) == programs - 1


def test_what_is_known_of_a_storage_ends_with_it() -> None:
    """A new allocation of another size where one was freed: its facts are its own."""

    def region(elements: int) -> Any:
        return SimpleNamespace(
            address=64, storage_elements=elements, dtype=torch.float32, bits=b"\0" * 4, dense=True, block=0
        )

    known = {"region": region(8)}
    watch: Any = SimpleNamespace(
        region=lambda address: known["region"], fresh=lambda address: True, take_written=lambda address: []
    )
    described = Described(Arena(torch.device("cpu"), "nan"), watch)
    sizes, marked = [], []
    for elements in (8, 16):
        known["region"] = region(elements)
        facts = described(64)
        assert facts is not None
        assert facts.written is not None
        marked.append(bool(facts.written.any()))
        facts.written[:] = True
        sizes.append(facts.written.size)
    assert sizes == [32, 64]
    assert not any(marked)
