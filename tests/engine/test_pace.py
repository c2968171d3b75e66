"""When a longer case is not begun, because what shorter ones took says that it would pass for a hang."""

from __future__ import annotations

from pytest_fusion.engine.pace import REFERENCE, Pace


def test_what_grows_is_expected_to_grow_on() -> None:
    """2 s at 4097 and 0.5 at 1025 are half a minute at 65537; of another dim, or a shorter size, nothing is known."""
    pace = Pace(15.0)
    assert pace.forbids({"dim n": 65537}) == ""
    pace.note({"dim n": 1025, "dim rows": 3}, 0.5)
    pace.note({"dim n": 4097, "dim rows": 3}, 2.0)
    assert "a call took 2 s at n=4097, so one at 65537 may take 32 s" in pace.forbids({"dim n": 65537, "dim rows": 1})
    assert pace.forbids({"dim n": 6144}) == ""
    assert pace.forbids({"dim rows": 65537, "dim n": 3}) == ""
    assert pace.forbids({"dim n": 4097}) == ""


def test_one_size_is_enough_to_forbid() -> None:
    """1.5 s at 1025 may be 6 at 4097, and a dozen times that for the case; 0.4 s may be 1.6."""
    pace = Pace(15.0)
    pace.note({"dim batch": 1025}, 1.5)
    assert "so one at 4097 may take 6 s" in pace.forbids({"dim batch": 4097})
    pace = Pace(15.0)
    pace.note({"dim batch": 1025}, 0.4)
    assert pace.forbids({"dim batch": 4097}) == ""


def test_the_slowest_call_of_a_size_counts() -> None:
    """A row in one step says nothing of one in chunks of 4."""
    pace = Pace(15.0)
    for took in (0.01, 0.5, 0.02):
        pace.note({"dim rows": 4097}, took)
    assert "a call took 0.5 s at rows=4097, so one at 65537 may take 8 s" in pace.forbids({"dim rows": 65537})
    pace.note({"dim rows": 3}, 100.0)
    assert pace.forbids({"dim rows": 8194}) == ""


def test_what_does_not_grow_forbids_nothing() -> None:
    """What each call takes anyway, and sizes that are named by their class, say nothing of longer rows."""
    pace = Pace(15.0)
    for size, took in ((1025, 0.45), (4097, 0.5)):
        pace.note({"dim n": size, "dim rows": "prime"}, took)
    assert pace.forbids({"dim n": 65537}) == ""
    for size, took in ((256, 0.003), (257, 1.0), (1025, 0.02)):
        pace.note({"dim rows": size}, took)
    assert pace.forbids({"dim rows": 65537}) == ""  # what short rows take is no measure
    pace.note({"dim rows": "prime"}, 100.0)
    assert pace.forbids({"dim rows": "power"}) == ""


def test_a_reference_has_a_measure_of_its_own() -> None:
    """A case has a run or two of it and a dozen calls: 2 s at 1025 let it have 4097, of a call they do not."""
    pace = Pace(20.0)
    pace.note({"dim n": 1025}, 0.01)
    pace.note({"dim n": 1025}, 2.0, REFERENCE)
    assert pace.forbids({"dim n": 4097}) == ""
    pace.note({"dim n": 4097}, 9.0, REFERENCE)
    assert "a run of the reference took 9 s at n=4097, so one at 8194 may take" in pace.forbids({"dim n": 8194})
