"""Persistent loops: what is wrong once a program has several tiles, beside what is wrong in its first already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion import interpreter, tensor
from pytest_fusion.case.case_model import Case
from pytest_fusion.diagnosis.diagnose import diagnose
from pytest_fusion.diagnosis.rules.turns import later

if torch.cuda.device_count() > 0:
    pytest.skip("a GPU answers for itself", allow_module_level=True)
interpreter.enable()

T = torch.Tensor

X = {"x": tensor("rows n")}
SIZES = {"dim rows": 9, "dim n": 2}


def programs_for(x: T) -> int:
    """As many as the device has multiprocessors, and no more than there are rows."""
    return min(int(torch.cuda.get_device_properties(0).multi_processor_count), len(x))


def drops_rest(x: T) -> T:
    """Shares of whole rows, rounded down."""
    out = torch.empty_like(x)
    programs = programs_for(x)
    if programs:
        whole = len(x) // programs * programs
        out[:whole] = 2 * x[:whole]
    return out


def keeps_sum(x: T) -> T:
    """Row sums of which a program forgets to clear the last one."""
    programs = programs_for(x)
    out = x.float().sum(-1)
    for row in range(programs, len(x)):
        out[row] += out[row - programs]
    return out.to(x.dtype)


def triples(x: T) -> T:
    """Wrong in each row, whatever is told."""
    programs_for(x)
    return 3 * x


def few(case: Case) -> Case:
    return case.with_(multiprocessors=8)


@pytest.mark.parametrize(
    ("fused", "reference"),
    [(drops_rest, lambda x: 2 * x), (keeps_sum, lambda x: x.float().sum(-1).to(x.dtype))],
)
def test_a_turn_that_is_wrong_is_named(lab_of: Any, fused: Callable[[T], T], reference: Callable[[T], T]) -> None:
    """Rows that no turn reaches, and what one turn leaves behind for the next."""
    found = diagnose(lab_of(fused, reference, X, SIZES, change=few))
    assert found.cause == "later-turn", found
    assert found.evidence[0].startswith("right where the launcher is told of 132 multiprocessors, wrong where of 8:")


def test_what_fails_in_the_first_turn_is_no_matter_of_turns(lab_of: Any) -> None:
    """Another number of multiprocessors cures nothing."""
    found = diagnose(lab_of(triples, lambda x: 2 * x, X, SIZES, change=few))
    assert found.cause == "wrong-scale", found


def test_a_case_that_tells_nothing_is_not_asked(lab_of: Any) -> None:
    """A failure on all of an H100 has no fewer multiprocessors to go back from."""
    lab = lab_of(triples, lambda x: 2 * x, X, SIZES)
    assert later(lab) is None
    assert lab.runs == 0
