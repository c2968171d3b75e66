"""Which ways of a problem are timed, and what the others' words are, with a made-up device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from benchmarks.suite import measure
from benchmarks.suite.measure import Place, measured
from benchmarks.suite.model import COMPILE, EAGER, OURS, Call, Problem, Row, Way, Work
from benchmarks.suite.timing import Ceilings

CPU = torch.device("cpu")


@dataclass
class Batch:
    """Says that each call takes two seconds."""

    takes: float = 2.0
    timer: str = "graph"

    def seconds(self) -> float:
        return self.takes


class Rotation:
    """Keeps no copies; calls that write into their inputs are noted."""

    mutating: list[bool]

    @classmethod
    def of(cls, *_: Any) -> Rotation:
        made = cls()
        cls.mutating = []
        return made

    def batch(self, _: Call, __: float, mutates: bool = False, plain: str = "") -> Batch:
        type(self).mutating.append(mutates)
        return Batch(timer="events" if plain else "graph")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(measure, "Rotation", Rotation)
    monkeypatch.setattr(measure, "once", lambda *_: 1.0)
    monkeypatch.setattr(measure, "peak", lambda *_: 123)
    monkeypatch.setattr(measure, "_freed", lambda: None)
    monkeypatch.setattr(measure, "compiled", lambda call: call)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return Place(CPU, 1 << 20, Ceilings(Batch(0.5), Batch(0.25)))


def _problem(others: dict[str, Way], eager: Callable[..., Any] | None = torch.exp, **more: Any) -> Problem:
    x = torch.linspace(0, 1, 100)
    return Problem({"input": x}, torch.exp, eager, Work(800, 100), others, grads=("input",), **more)


ROW = Row("family", "text", _problem, {}, {})


def _refused(input: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such width")


def _absent(input: torch.Tensor) -> torch.Tensor:
    raise ModuleNotFoundError("No module named 'liger_kernel'", name="liger_kernel")


def test_all_ways_that_agree_are_timed(place: Place) -> None:
    """Torch.compile's among them, with their memory, beside the ceilings of the same rounds."""
    found = measured(ROW, _problem({"library": Way(torch.exp)}), "forward", place)
    assert dict(found.seconds) == dict.fromkeys((OURS, EAGER, COMPILE, "library"), 2.0)
    assert set(found.memory.values()) == {123}
    assert found.copy_bytes_per_s == Ceilings.copied(0.5)
    assert found.matmul_flops_per_s == Ceilings.multiplied(0.25)
    assert found.words == {}


def test_a_way_that_no_graph_has_is_not_captured(place: Place) -> None:
    """It says so itself; the others are, all the same."""
    found = measured(ROW, _problem({"library": Way(torch.exp, plain="it waits")}, compiles=None), "forward", place)
    assert dict(found.timers) == {OURS: "graph", EAGER: "graph", "library": "events"}


def test_what_disagrees_raises_or_is_absent_has_words(place: Place) -> None:
    """A part of the work is timed and not compared; what is left out is not called."""
    place.without = (COMPILE,)
    ways = {
        "wrong": Way(torch.sin),
        "raises": Way(_refused),
        "absent": Way(_absent),
        "part": Way(torch.neg, part=True),
    }
    found = measured(ROW, _problem(ways), "forward", place)
    assert set(found.seconds) == {OURS, EAGER, "part"}
    assert found.parts == ("part",)
    assert found.words["wrong"].startswith("wrong: result 0 is")
    assert found.words["raises"] == "ValueError: no such width"
    assert found.words["absent"] == "liger_kernel is not installed"
    assert found.words[COMPILE] == "left out"


def test_without_the_truth_the_next_way_is_what_results_are_compared_with(place: Place) -> None:
    """Ours is never its own judge: with nothing else that runs, it has no time."""
    found = measured(ROW, _problem({"library": Way(torch.exp)}, _refused, compiles=None), "forward", place)
    assert set(found.seconds) == {OURS, "library"}
    found = measured(ROW, _problem({}, _refused, compiles=None), "forward", place)
    assert found.words[OURS] == "wrong: there is nothing to compare it with"
    assert found.seconds == {}


def test_random_results_are_asked_about_one_by_one(place: Place) -> None:
    """By the problem's own question, of values alone where gradients come with them."""

    def agrees(inputs: Any, result: torch.Tensor) -> str:
        return "" if float(result.detach().sum()) > 0 else "it is negative"

    problem = _problem({"negative": Way(torch.neg)}, agrees=agrees)
    for span in ("forward", "both"):
        found = measured(ROW, problem, span, place)
        assert found.words == {"negative": "wrong: it is negative"}


def test_what_writes_into_its_inputs_gets_copies(place: Place) -> None:
    """The others see what the problem was made with; the timed calls are told too."""

    def spoils(input: torch.Tensor) -> torch.Tensor:
        y = torch.exp(input)
        input.zero_()
        return y

    problem = _problem({"spoils": Way(spoils, mutates=("forward",))}, compiles=None)
    found = measured(ROW, problem, "forward", place)
    assert set(found.seconds) == {OURS, EAGER, "spoils"}
    assert sorted(Rotation.mutating) == [False, False, True]
    assert float(problem.inputs["input"].max()) == 1.0


def test_gradients_are_compared_too(place: Place) -> None:
    """A way with the right values and wrong gradients is no way."""

    def detached(input: torch.Tensor) -> torch.Tensor:
        return torch.exp(input.detach()) + 0 * input

    problem = _problem({"detached": Way(detached)}, compiles=None)
    assert "detached" in measured(ROW, problem, "forward", place).seconds
    assert "result 1 is" in measured(ROW, problem, "both", place).words["detached"]
