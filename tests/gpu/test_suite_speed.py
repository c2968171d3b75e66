"""The suite's speed on a GPU: one row timed whole, what is wrong or raises has words, tiles tried and put back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.suite.families import rows
from benchmarks.suite.measure import Place, measured, released
from benchmarks.suite.model import COMPILE, EAGER, LIGER, OURS, Problem, Row, Way
from benchmarks.suite.run import Budget
from benchmarks.suite.timing import Ceilings
from benchmarks.suite.tunables import TUNABLES
from benchmarks.suite.tune import at
from pytest_fusion.bench.on_device import opened

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
SIZES = {"rows": 2048, "n": 2048}


def _row(start: str, **more: Any) -> Row:
    found = next(row for row in rows()[0] if row.name.startswith(start))
    return replace(found, sizes={**SIZES, **more})


@pytest.fixture
def place() -> Any:
    device = torch.device("cuda:0")
    yield Place(device, opened(device).cache, Ceilings.on(device), without=(COMPILE, LIGER))
    released()


def test_both_passes_of_a_row_are_timed(place: Place) -> None:
    """In graphs, beside a copy of plausible bandwidth; gradients too; what is left out says so."""
    row = _row("rms_norm: 16384x8192")
    problem = row.make(place.device, **row.sizes)
    forward, both = (measured(row, problem, span, place) for span in ("forward", "both"))
    for found in (forward, both):
        assert {OURS, EAGER, "F.rms_norm"} <= set(found.seconds)
        assert set(found.timers.values()) == {"graph"}
        assert found.words[COMPILE] == "left out"
        assert found.copy_bytes_per_s is not None
        assert 1e11 < found.copy_bytes_per_s < 2e13
        assert found.memory[OURS] >= 2 * 2048 * 2048
    assert both.seconds[OURS] > forward.seconds[OURS]
    bandwidth = forward.bytes_per_s()
    assert bandwidth is not None
    assert bandwidth < 2 * (forward.copy_bytes_per_s or 0)


def test_a_wrong_way_and_one_that_raises_have_words(place: Place) -> None:
    """They are not timed, and the others are; one that writes into its inputs spoils nothing."""
    row = _row("softmax: plain")

    def spoils(x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1)
        x.zero_()
        return y

    def refuses(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such width")

    problem: Problem = row.make(place.device, **row.sizes)
    problem.others = {
        "wrong": Way(lambda x: torch.softmax(2 * x, -1)),
        "raises": Way(refuses),
        "spoils": Way(spoils, mutates=("forward",)),
    }
    found = measured(row, problem, "forward", place)
    assert found.words["wrong"].startswith("wrong: result 0 is")
    assert found.words["raises"] == "ValueError: no such width"
    assert set(found.seconds) == {OURS, EAGER, "spoils"}
    assert float(problem.inputs["x"].abs().max()) > 0


def test_tiles_are_tried_and_put_back() -> None:
    """The one in use comes first with its registers, others have times; then the kernel's own function is back."""
    from reference_kernels.softmax import kernel

    original = kernel.config
    device = torch.device("cuda:0")
    tunable = next(each for each in TUNABLES if each.name == "softmax")
    tried = at(tunable, _row("softmax: plain"), device, opened(device).cache, Budget(60))
    released()
    assert kernel.config is original
    assert tried[0].final
    assert tried[0].over_current == 1.0
    assert "_softmax_kernel" in tried[0].resources
    assert sum(each.seconds is not None for each in tried) >= 3
