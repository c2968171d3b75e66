"""A kernel that the assembler got wrong: told from what is loaded for the failing call, on a GPU alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pytest_fusion.diagnosis.rules import machine_code
from pytest_fusion.run.measure.resources.resource_record import Resources
from pytest_fusion.spec.inputs import tensor

T = torch.Tensor
WRONG = Resources("attention_kernel", "sm_90", "refused", "ptxas made code of it that reads UR22, which nothing wrote")
RIGHT = Resources("attention_kernel", "sm_90")


@pytest.mark.parametrize(
    ("loaded", "device", "cause", "ruled_out"),
    [
        ([RIGHT, WRONG], "cuda", "miscompiled", 0),
        ([RIGHT], "cuda", None, 1),
        ([], "cuda", None, 0),  # nothing was launched that could be read
        ([WRONG], "cpu", None, 0),  # an interpreter has no machine code
    ],
)
def test_what_was_loaded_tells(
    lab_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    loaded: list[Resources],
    device: str,
    cause: str | None,
    ruled_out: int,
) -> None:
    """The cause and the sentence of the record; the rule is asked as if of a GPU, whose kernels are made up."""
    lab = lab_of(lambda x: x * 3, lambda x: x * 2, {"x": tensor("n")}, {"dim n": 8})

    @contextmanager
    def made_up(into: list[Resources]) -> Iterator[None]:
        yield
        into += loaded

    class Device:
        type = device

    once = lab.once
    own = lab.bench.device

    def on_its_own_device(case: Any) -> Any:
        lab.bench.device = own
        return once(case)

    monkeypatch.setattr(machine_code, "loaded", made_up)
    monkeypatch.setattr(lab, "once", on_its_own_device)
    lab.bench.device = Device()
    found = machine_code.miscompiled(lab)

    assert (found.cause if found is not None else None) == cause
    if found is not None:
        assert found.evidence == [f"attention_kernel: {WRONG.reason}"]
    assert len(lab.ruled_out) == ruled_out
