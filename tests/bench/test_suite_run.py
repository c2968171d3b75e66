"""The suite's rows in a row: budget, errors, samples in turn, a file after every row, by made-up clocks."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.suite import __main__ as command
from benchmarks.suite.agreement import apart
from benchmarks.suite.compiled import OutOfTime, time_limit
from benchmarks.suite.families import fits, rows
from benchmarks.suite.figures import Figures
from benchmarks.suite.model import OURS, Bar, Problem, Row, Span, Work
from benchmarks.suite.passes import both, upstream_of
from benchmarks.suite.run import Budget, entries, read, spans_of, write
from benchmarks.suite.timing import FEWEST, MOST, Restored, Samples, calls_of, interleaved

CPU = torch.device("cpu")


@dataclass
class Clock:
    """Time that passes by what is asked of it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Thing:
    """Takes so long a sample, of ``clock`` and as it says."""

    clock: Clock
    takes: float
    says: list[float]
    timer: str = "graph"
    calls: int = 0

    def seconds(self) -> float:
        self.clock.now += self.takes
        self.calls += 1
        return self.says[(self.calls - 1) % len(self.says)]


def _problem(device: torch.device, n: int) -> Problem:
    if n < 0:
        raise RuntimeError("there is no memory")
    return Problem({"x": torch.ones(n, device=device)}, torch.exp, torch.exp, Work(8 * n), grads=("x",))


def _row(text: str, n: int = 4, *, backward: bool = False, bar: Bar | None = None) -> Row:
    return Row("family", text, _problem, {"n": n}, {"n": 1}, (bar,) if bar else (), backward)


@dataclass
class Measure:
    """Made-up figures, each of which takes ``takes`` seconds of ``clock``."""

    clock: Clock
    takes: float = 10.0
    seen: list[tuple[str, Span]] = field(default_factory=list)

    def __call__(self, row: Row, problem: Problem, span: Span, _: Any) -> Figures:
        self.clock.now += self.takes
        self.seen.append((row.text, span))
        if row.text == "raises":
            raise ValueError("no such tile")
        seconds = 3.0 if span == "both" else 1.0
        return Figures(row.family, row.text, span, problem.work_of(span), {OURS: seconds})


def test_rows_beyond_the_budget_are_not_measured() -> None:
    """They are in the table, with words and their bars; nothing of them is made."""
    clock = Clock()
    measure = Measure(clock)
    bar = Bar("us", 1.0)
    found = list(entries([_row(name, bar=bar) for name in "abc"], None, Budget(21, clock), measure=measure, device=CPU))
    assert measure.seen == [("a", "forward"), ("b", "forward")]
    assert [each.figures.words.get(OURS) for each in found] == [None, None, "out of time"]
    assert [each.bars[0].outcome for each in found] == ["missed", "missed", "not measured"]


def test_a_row_that_raises_has_words_and_the_next_is_measured() -> None:
    """Whether its problem cannot be made or a pass of it cannot be measured."""
    clock = Clock()
    given = [_row("impossible", -1), _row("raises", backward=True), _row("fine")]
    found = list(entries(given, None, Budget(100, clock), measure=Measure(clock), device=CPU))
    words = [(each.figures.text, each.figures.span, each.figures.words.get(OURS)) for each in found]
    assert words[0] == ("impossible", "forward", "RuntimeError: there is no memory")
    assert words[1:4] == [("raises", span, "ValueError: no such tile") for span in ("forward", "both", "backward")]
    assert found[4].figures.ours == 1.0


def test_a_backward_pass_is_the_difference_of_two_measurements() -> None:
    """Three lines of one problem; a budget that ends between them leaves the first."""
    clock = Clock()
    row = _row("a", backward=True)
    found = list(entries([row], None, Budget(100, clock), measure=Measure(clock), device=CPU))
    assert [(each.figures.span, each.figures.ours) for each in found] == [("forward", 1), ("both", 3), ("backward", 2)]
    clock = Clock()
    found = list(entries([row], None, Budget(11, clock), measure=Measure(clock), device=CPU))
    assert [each.figures.words.get(OURS) for each in found] == [None, "out of time", "out of time"]
    assert spans_of(row, ("forward",)) == ("forward",)


def test_the_file_is_whole_after_every_row(tmp_path: Path) -> None:
    """It has everything so far with its bars, and nothing else is left beside it."""
    clock = Clock()
    path = tmp_path / "deep" / "suite.json"
    found = []
    given = [_row(name, bar=Bar("us", 1.0)) for name in "ab"]
    for entry in entries(given, None, Budget(100, clock), measure=Measure(clock), device=CPU):
        found.append(entry)
        write(path, {"gpu": "made up"}, found)
        data = json.loads(path.read_text())
        assert [row["text"] for row in data["rows"]] == list("ab")[: len(found)]
        assert data["rows"][-1]["bars"][0]["outcome"] == "missed"
    assert [each.name for each in path.parent.iterdir()] == ["suite.json"]


def test_files_of_several_runs_make_one_table(tmp_path: Path) -> None:
    """In the order of the rows, held to their bars as they are now; a later time counts, a later reason does not."""
    clock = Clock()
    given = [_row(name, bar=Bar("us", 2e6)) for name in "ab"]
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    write(first, {"gpu": "one"}, list(entries(given, None, Budget(100, clock), measure=Measure(clock), device=CPU)))
    write(second, {"gpu": "two"}, list(entries([given[1]], None, Budget(0, clock), measure=Measure(clock), device=CPU)))
    found, environments = read([first, second], list(reversed(given)))
    assert [each["gpu"] for each in environments] == ["one", "two"]
    assert [(each.figures.text, each.figures.ours, each.bars[0].outcome) for each in found] == [
        ("b", 1.0, "met"),
        ("a", 1.0, "met"),
    ]
    assert found[0].figures == next(each for each in read([first], given)[0] if each.figures.text == "b").figures
    assert read([first], [])[0][0].bars == ()
    second.write_text("{}")
    with pytest.raises(ValueError, match="is no file of"):
        read([second], given)


def test_samples_are_taken_in_turn_until_they_are_known_well() -> None:
    """Steady things end after the fewest rounds beyond the warm-up, whose samples are dropped."""
    clock = Clock()
    first, second = Thing(clock, 0.01, [1.0]), Thing(clock, 0.01, [2.0])
    found = interleaved({"a": first, "b": second}, clock=clock, budget_s=10.0)
    assert first.calls == second.calls
    assert found["a"].median == 1.0
    assert len(found["b"].seconds) == FEWEST
    assert first.calls > FEWEST


def test_scattered_samples_end_with_the_budget_or_the_most_rounds() -> None:
    """Each thing keeps at least the fewest samples, however long one takes."""
    clock = Clock()
    slow = Thing(clock, 5.0, [1.0, 2.0])
    assert len(interleaved({"a": slow}, clock=clock, budget_s=1.0)["a"].seconds) == FEWEST
    still = Thing(Clock(), 0.0, [1.0, 2.0])
    assert len(interleaved({"a": still}, clock=Clock(), budget_s=1.0)["a"].seconds) == FEWEST
    assert still.calls == MOST
    quick = Thing(clock := Clock(), 0.02, [1.0, 2.0])
    assert len(interleaved({"a": quick}, clock=clock, budget_s=100.0)["a"].seconds) == MOST


def test_the_error_of_a_median_shrinks_with_samples() -> None:
    """By the root of their number; of equal ones it is 0."""
    assert Samples((1.0,) * 10).error == 0.0
    few, many = Samples((1.0, 1.1) * 8), Samples((1.0, 1.1) * 32)
    assert many.error == pytest.approx(few.error / 2, rel=0.05)


@pytest.mark.parametrize(("once_s", "sets", "calls"), [(1e-2, 1, 1), (1e-2, 7, 7), (1e-4, 7, 21), (1e-6, 7, 294)])
def test_a_sample_goes_through_all_copies(once_s: float, sets: int, calls: int) -> None:
    """As often as its two milliseconds ask for, in whole rounds, at most 300 calls."""
    assert calls_of(once_s, sets) == calls


def test_a_call_that_takes_too_long_is_ended() -> None:
    """`OutOfTime` passes what catches exceptions; a body that ends in time goes on unharmed."""

    def stubborn() -> None:
        """As a compiler that goes on without what failed."""
        for _ in range(100):
            with contextlib.suppress(Exception):
                time.sleep(0.1)

    with pytest.raises(OutOfTime), time_limit(0.05):
        stubborn()
    with time_limit(60):
        done = True
    assert done


def test_results_are_compared_roughly() -> None:
    """Rounding agrees; another function, shape, number of results or infinity does not."""
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert apart((x.bfloat16(),), [x.bfloat16() * 1.001]) == ""
    assert "of its norm away" in apart(x, x + 0.1)
    assert "shape" in apart(x, x[:50])
    assert "2 tensors instead of 1" in apart((x, x), x)
    assert "not finite" in apart(torch.where(x > 1, torch.nan, x), x)
    assert "differs at" in apart(torch.arange(100), torch.arange(100) // 2)
    assert apart(torch.arange(100), torch.arange(100)) == ""


def test_both_passes_give_results_and_gradients() -> None:
    """Of the named inputs alone, for the gradients that come from above; a loss is given 1."""
    inputs = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([3.0, 4.0])}
    above = upstream_of(lambda x, y: (x * y).sum(), dict(inputs), ("x",))
    assert [each.tolist() for each in above] == [1.0]
    result, grads = both(lambda x, y: (x * y).sum(), ("x",))(upstream=above, **inputs)
    assert float(result.detach()) == 11.0
    assert [each.tolist() for each in grads] == [[3.0, 4.0]]
    assert not inputs["x"].requires_grad


def test_a_name_that_fits_no_row_is_refused() -> None:
    """It says which families there are; a family's name means its rows alone."""
    with pytest.raises(ValueError, match="families: pointwise, softmax"):
        rows(["sofmax"])
    found, _ = rows(["softmax", "8192x128256"])
    assert {row.family for row in found} == {"softmax", "cross_entropy"}
    assert not fits(found[0], "rms_norm")
    assert [row.name for row in rows(["batch_norm: eval"])[0]] == [
        row.name for row in rows(["batch_norm"])[0] if "evaluation" in row.name
    ]


def test_names_of_rows_are_their_own() -> None:
    """A row is found again by its name in the files of two runs."""
    names = [row.name for row in rows()[0]]
    assert len(names) == len(set(names))


def test_without_a_gpu_the_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, for there is nothing to time."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert command.main([]) == 2
    assert command.main(["tune"]) == 2
    assert capsys.readouterr().out.count("there is no CUDA device here") == 2


@pytest.mark.parametrize("extra", [["--passes", "forward"], ["--candidates"]], ids=["rows", "tiles"])
def test_processes_that_compile_ahead_are_asked_what_they_know(extra: list[str]) -> None:
    """The command takes what `compile_ahead` gives it, an empty choice of names included."""
    found = command._parser().parse_args(["warm", "--part", "1/6", *extra, "--only", "", "--device", "cuda:0"])
    assert (found.command, found.part, found.only) == ("warm", "1/6", "")
    assert found.candidates == ("--candidates" in extra)


def test_inputs_are_put_back_before_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a batch wrote into its copies is gone when the next sample begins, and the device has finished by then."""
    waited: list[float] = []
    original, mine = {"x": torch.ones(3), "at": torch.arange(3)}, {"x": torch.zeros(3), "at": torch.arange(3)}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waited.append(float(mine["x"].sum())))

    class Spoiling:
        timer = "events"

        def seconds(self) -> float:
            found = float(mine["x"].sum())
            mine["x"].zero_()
            return found

    thing = Restored(Spoiling(), [mine], [original])  # type: ignore[arg-type]
    assert [thing.seconds(), thing.seconds()] == [3.0, 3.0]
    assert waited == [3.0, 3.0]
    assert thing.timer == "events"
