"""The gate before a measurement: what is wrong has no number, and what does not fit is judged smaller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion import FusionSpec, dim, tensor, values
from pytest_fusion.bench.entries import entries, smaller
from pytest_fusion.bench.gate import gate
from pytest_fusion.errors import SpecError
from pytest_fusion.spec.dims import Dim

CPU = torch.device("cpu")


def spec(fused: Callable[..., Any], reference: Callable[..., Any] = torch.relu, **dims: Dim) -> FusionSpec:
    return FusionSpec(
        name="f",
        fused=fused,
        reference=reference,
        inputs={"input": tensor("rows n", values=values.finite())},
        dims=dims,
        bench=[{"rows": 1024, "n": 48, "dtype": torch.float32}],
    )


def roomy_to(rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A reference whose lanes find no memory for more rows."""

    def reference(input: torch.Tensor) -> torch.Tensor:
        if len(input) > rows:
            raise torch.OutOfMemoryError("made up")
        return torch.relu(input)

    return reference


def too_large(input: torch.Tensor) -> torch.Tensor:
    return torch.relu(input) * 1.01


def test_what_is_right_passes_without_a_word() -> None:
    """At the sizes of ``bench=``."""
    one = spec(torch.relu)
    assert gate(one, entries(one)[0], {}, CPU).wrong == ""
    assert gate(one, entries(one)[0], {}, CPU).notes == ()


def test_what_is_wrong_is_named() -> None:
    """By the check that fails."""
    one = spec(too_large)
    assert gate(one, entries(one)[0], {}, CPU).wrong.startswith("values failed")


def test_what_does_not_fit_is_judged_smaller() -> None:
    """With fewer rows of the same width; the note says at which sizes, and a failure there is one."""
    right = spec(torch.relu, roomy_to(256))
    found = gate(right, entries(right)[0], {}, CPU)
    assert (found.wrong, len(found.notes)) == ("", 1)
    assert found.notes[0].startswith("its result was judged at rows=256 n=48 float32: there is no memory")

    wrong = spec(too_large, roomy_to(512))
    assert gate(wrong, entries(wrong)[0], {}, CPU).wrong.startswith("at rows=512 n=48 float32: values failed")


def test_what_is_known_not_to_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is the largest tensor on the way, here of 9 times the elements of the input."""
    rows: list[int] = []

    def reference(input: torch.Tensor) -> torch.Tensor:
        if input.device.type != "meta":
            rows.append(len(input))
        return torch.relu(input.repeat(9, 1)[: len(input)])

    one = spec(torch.relu, reference)
    monkeypatch.setattr("pytest_fusion.bench.gate._room", lambda device: 9 * 500 * 48 * 224.0)
    found = gate(one, entries(one)[0], {}, CPU)
    assert (found.wrong, max(rows)) == ("", 256)
    assert found.notes[0].startswith("its result was judged at rows=256 n=48 float32: there is no memory")

    monkeypatch.setattr("pytest_fusion.bench.gate._room", lambda device: 9 * 1024 * 48 * 224.0)
    assert gate(one, entries(one)[0], {}, CPU).notes == ()


def test_what_fits_at_no_size_is_told() -> None:
    """Neither right nor wrong."""
    one = spec(torch.relu, roomy_to(0))
    found = gate(one, entries(one)[0], {}, CPU)
    assert (found.wrong, found.notes[0].startswith("its result was not judged: there is no memory")) == ("", True)


def test_another_refusal_of_the_reference_is_told() -> None:
    """It is no reason to look at smaller sizes."""

    def refuses(input: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("not so wide")

    one = spec(torch.relu, refuses)
    assert "not judged at these sizes: reference NotImplementedError" in gate(one, entries(one)[0], {}, CPU).notes[0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"batch": (512, 4), "n": 8192}, {"batch": (256, 4), "n": 8192}),
        ({"batch": (256, 4), "n": 8192}, {"batch": (256, 4), "n": 4096}),
        ({"batch": (256, 4), "n": 256}, None),
    ],
)
def test_rows_are_halved_before_they_are_shortened(given: dict[str, Any], expected: dict[str, Any] | None) -> None:
    """The first dim that is large, the largest number of a batch."""
    one = FusionSpec(
        name="f", fused=torch.relu, reference=torch.relu, inputs={"input": tensor("*batch n")}, bench=[given]
    )
    half = smaller(one, entries(one)[0])
    assert (half and {name: half.given[name] for name in given}) == expected


def test_a_size_that_has_no_half_is_not_halved() -> None:
    """The spec's own bounds hold."""
    one = spec(torch.relu, rows=dim(min=1000))
    with pytest.raises(SpecError):
        smaller(one, entries(one)[0])
