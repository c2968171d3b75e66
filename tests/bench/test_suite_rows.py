"""Every row of the suite's table at small sizes: its ways agree, and what it says it moves is what it must."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from benchmarks.suite.check import disagreements
from benchmarks.suite.families import rows
from benchmarks.suite.model import LIGER, Row, Way
from pytest_fusion.run.measure.traffic import bytes_of

DEVICE = torch.device("cuda" if torch.cuda.device_count() else "cpu")
_WITHOUT = () if importlib.util.find_spec("liger_kernel") else (LIGER,)


def _different() -> list[Row]:
    """Rows of one problem and one set of small sizes stand for each other."""
    return list({(row.make, str(row.small), row.backward): row for row in rows()[0]}.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", _different(), ids=lambda row: row.name)
def test_all_ways_of_a_row_agree(row: Row) -> None:
    """Ours, eager torch, Liger and libraries have one result, forward and backward; else times compare nothing."""
    assert disagreements(row, DEVICE, _WITHOUT) == {}


def test_a_way_that_computes_something_else_is_seen() -> None:
    """Both of a result that is off and of one that raises; a part of the work is not compared."""
    row = next(row for row in _different() if row.name.startswith("pointwise: relu"))

    def broken(device: torch.device, **sizes: int) -> object:
        problem = row.make(device, **sizes)
        problem.others = {
            "off": Way(lambda x, scale, bias: x),
            "raises": Way(lambda x: x),
            "part": Way(lambda **_: torch.zeros(1), part=True),
        }
        return problem

    found = disagreements(replace(row, make=broken, backward=False), DEVICE)  # type: ignore[arg-type]
    assert set(found) == {"forward, off", "forward, raises"}


@pytest.mark.parametrize("row", _different(), ids=lambda row: row.name)
def test_a_row_moves_its_inputs_and_results_once(row: Row) -> None:
    """Lower bounds count what ours is given and returns: no more, but for statistics that read the input once more, and
    nearly all of what it returns."""
    problem = row.make(DEVICE, **row.small)
    with torch.no_grad():
        result = problem.ours(**problem.inputs)
    given, returned = (
        bytes_of(leaf for leaf in tree_leaves(side) if isinstance(leaf, torch.Tensor))
        for side in (problem.inputs, result)
    )
    most = given + returned
    assert 0 < problem.work.bytes <= (1.6 * most if row.family == "batch_norm" else most)
    assert problem.work.bytes >= 0.6 * returned
