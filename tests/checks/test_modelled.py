"""Without a GPU launchers are told of few multiprocessors in cases of hundreds of rows, alike in all calls of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fusion import interpreter
from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.checks.multiprocessors import FEW, MANY, described, multiprocessors_of, with_few
from pytest_fusion.interpreter.bridge.modelled_device import PROPERTIES
from pytest_fusion.spec.inputs import tensor
from tests.checks.conftest import Examine, JudgeOne

if torch.cuda.device_count() > 0:
    pytest.skip("a GPU answers for itself", allow_module_level=True)
interpreter.enable()

_TILE = 1024


def asked() -> int:
    """What a launcher asks before it chooses its grid."""
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def persistent_relu(x: torch.Tensor, *, next_tile: bool = False) -> torch.Tensor:
    """Each of at most so many programs takes every so-manieth tile; with ``next_tile`` the one beside its last."""
    flat = x.contiguous().reshape(-1)
    out = torch.full_like(flat, -1.0)
    tiles = -(-flat.numel() // _TILE)
    programs = min(asked(), tiles)
    for program in range(programs):
        for turn, tile in enumerate(range(program, tiles, programs)):
            at = (program + turn if next_tile else tile) * _TILE
            out[at : at + _TILE] = flat[at : at + _TILE].relu()
    return out.reshape(x.shape)


@pytest.mark.slow
def test_a_persistent_loop_has_a_second_turn(examine: Examine) -> None:
    """Of 132 programs none has one below 135,169 elements, whichever tile it would take."""
    inputs = {"x": tensor("rows n")}

    right = examine(persistent_relu, torch.relu, inputs, cases=170)
    wrong = examine(lambda x: persistent_relu(x, next_tile=True), torch.relu, inputs, cases=170)

    assert (right.verdict, right.failed_check) == ("pass", None)
    assert (wrong.verdict, wrong.failed_check) == ("fail", "values")


@pytest.mark.parametrize(
    ("sizes", "count"), [((3, 5), MANY), ((640, 160), FEW), (((20, 50), 3), FEW), ((3, 4097), MANY), ((), MANY)]
)
def test_the_case_decides(sizes: tuple[Any, ...], count: int) -> None:
    """A long one has those of an H100, since the interpreter runs turns one after the other; so have small ones, of
    which the first call is one, and a given call."""
    case = with_few(Case({str(i): size for i, size in enumerate(sizes)}, "float32", {"x": TensorCase("float32")}))
    assert multiprocessors_of(case) == count
    with described(case):
        assert asked() == PROPERTIES["multi_processor_count"] == count
    assert asked() == MANY


def test_all_calls_of_a_case_are_told_the_same(judge_one: JudgeOne) -> None:
    """Those with more slices too: how a kernel splits a sum may follow from it, and is no question of the batch."""
    heard: set[tuple[int, int]] = set()

    def summed(x: torch.Tensor) -> torch.Tensor:
        heard.add((len(x), asked()))
        return x.double().sum(-1).float()

    result = judge_one(
        summed,
        lambda x: x.sum(-1),
        case=with_few(Case({"rows": 150, "hidden": 20}, "float32", {"x": TensorCase("float32")})),
        invariant="rows",
    )

    assert result.failure is None
    assert {count for _, count in heard} == {FEW}
    assert max(rows for rows, _ in heard) > 2000
