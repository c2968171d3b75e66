"""Rows are plain data that survive JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pytest_fusion.bench.baseline.row import Row, Session, stable
from tests.bench.baseline.made import golden, latency, row


def test_a_row_survives_json() -> None:
    """What is read back equals what was written, with everything that a row can hold."""
    made = row(latency=latency(history=(Session(-0.69, "u2", "2026-11-01"),)), golden=(golden(values=(float("inf"),)),))

    assert Row.from_json(json.loads(json.dumps(made.as_json(), allow_nan=False))) == made


def test_a_row_with_nothing_optional_survives_json() -> None:
    """What a row lacks is left out of its JSON and is empty again when read."""
    made = row({}, names={}, methods={}, environment={}, made="")

    assert set(made.content()) == {"case", "role"}
    assert Row.from_json(json.loads(json.dumps(made.as_json()))) == made


def test_a_row_travels_between_processes() -> None:
    """Its JSON has exact builtin types alone, also where a latency was given numbers of numpy."""
    number = np.float64(0.5)
    made = row(latency=latency(fused_s=number, aa=number, blocks=(number,), history=(Session(number),)))

    def types(value: object) -> set[type]:
        if isinstance(value, dict):
            return set().union(*(types(item) for item in value.values()))
        return set().union(*(types(item) for item in value)) if isinstance(value, list) else {type(value)}

    assert types(made.as_json()) == {str, int, float}


@pytest.mark.parametrize("value", [1.0, True, np.int64(1), "1", None])
def test_a_fact_is_an_int_and_nothing_like_it(value: object) -> None:
    """A float cannot be compared exactly, and a number of numpy would end a run of pytest-xdist."""
    with pytest.raises(TypeError, match=r"fact 'launches.kernels' is .* an int is needed"):
        row({"launches.kernels": value})  # type: ignore[dict-item]


def test_addresses_of_objects_are_no_part_of_a_test() -> None:
    """The same test has the same id in the next process."""
    assert stable("t.py::test[<K object at 0x7f12ab>-3]") == stable("t.py::test[<K object at 0x7e99>-3]")
    assert stable("t.py::test[at 0x-3]") == "t.py::test[at 0x-3]"


def test_only_rows_of_the_fused_kernel_are_judged() -> None:
    """Its backward is the kernel too; the reference and the compiled function are what it is compared with."""
    roles = {role: row(role=role).judged for role in ("fused", "fused backward", "reference", "compiled", "fusedish")}

    assert roles == {"fused": True, "fused backward": True, "reference": False, "compiled": False, "fusedish": False}
