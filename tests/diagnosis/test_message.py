"""The text of a failure."""

from __future__ import annotations

from pytest_fusion.checks.verdict import failed
from pytest_fusion.diagnosis.diagnosis_model import Diagnosis
from pytest_fusion.diagnosis.text.message import also_found, compose, larger_case, place, replay_command

CASE = {
    "dims": {"rows": 3, "hidden": 129},
    "dtype": "bfloat16",
    "seed": 0,
    "absent": ["bias"],
    "drawn": {"eps": 0.5, "limit": {"tuple": [0.0, {"float": "inf"}]}},
    "inputs": {
        "x": {"dtype": "bfloat16", "shape": [3, 129], "layout": "padded", "variant": 1, "strides": [132, 1],
              "offset": 4, "values": "nan"},
        "bias": {"dtype": "bfloat16", "shape": [129], "layout": "contiguous", "variant": 0, "strides": [1],
                 "offset": 0, "values": "unit"},
    },
}  # fmt: skip


def test_a_message_tells_what_where_which_case_why_and_how_to_see_it_again() -> None:
    """Every part that is given has its line, in that order."""
    text = compose(
        "test_norm",
        failed("values", "out: 3 elements are off"),
        CASE,
        diagnosis=Diagnosis("tail-mask", ["right at hidden=64 and 128, wrong at 65"], ["layout: not needed"]),
        where=["where: axis 1: index 128 of 129 (the last)"],
        larger=["a larger case: rows=5"],
        command=replay_command("tests/test_k.py::test_norm[a b]", ".fusion/failures/x.json"),
        trace="Traceback\n  line",
        found_after="found after 12 case(s)",
    )
    parts = [
        "test_norm: values failed",
        "out: 3 elements are off",
        "where: axis 1: index 128 of 129 (the last)",
        "smallest case: rows=3 hidden=129, dtype bfloat16, seed 0",
        "x: bfloat16 [3, 129], padded/1, strides [132, 1], storage offset 4, values nan",
        "bias: None",
        "eps = 0.5",
        "limit = (0.0, inf)",
        "a larger case: rows=5",
        "likely cause: tail-mask (",
        "right at hidden=64 and 128, wrong at 65",
        "what to do: check the mask of the last block",
        "found after 12",
        "Traceback",
        "replay: pytest 'tests/test_k.py::test_norm[a b]' --fusion-replay .fusion/failures/x.json",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_multiprocessors_are_told_where_the_case_has_them() -> None:
    """A failure that needs few of them names them; others say nothing of the modelled device."""
    told = "on 8 multiprocessors, where the launcher queries them"
    assert told in compose("test_norm", failed("values", "off"), {**CASE, "multiprocessors": 8})
    assert "multiprocessors" not in compose("test_norm", failed("values", "off"), CASE)


def test_values_of_small_tensors_and_constants_are_shown() -> None:
    """After the kind of values, where it has a name."""
    case = {**CASE, "held": {"x": "-inf 3", "bias": "1 2"}, "absent": [], "constants": {"scale": "0.5"}}
    text = compose("test_norm", failed("values", "off"), case)
    assert "storage offset 4, values nan: -inf 3\n" in text
    assert "strides [1], values: 1 2\n" in text
    assert "scale = 0.5" in text


def test_a_larger_case_shows_its_place_and_its_integers() -> None:
    """Of a second case: where it is wrong and what decides that, not its floats."""
    found = {"total": 6, "where": "axis 0: index 0 of 3 (the first)"}
    lines = larger_case({**CASE, "held": {"x": "0.5 1.5", "slot": "1 0 3"}}, found)
    assert lines[0].startswith("a larger case: rows=3 hidden=129")
    assert [line.strip() for line in lines[1:]] == ["where: axis 0: index 0 of 3 (the first)", "slot: 1 0 3"]
    assert place({"total": 1, "where": "everywhere"}) == []


def test_other_findings_have_their_case_and_how_to_accept_them() -> None:
    """Accepted ones have the reason instead, and what is unexplained cannot be accepted."""
    one = {"code": "hidden-sync", "check": "device", "level": "hazard", "message": "it waits", "case": CASE}
    accept = {"accept": 'allow={"hidden-sync": "why"}', "allowed": None}
    text = "\n".join(also_found([{**one, **accept}], ["repeat: differs"]))
    assert "hazard: hidden-sync (device)" in text
    assert 'to accept it: allow={"hidden-sync": "why"}' in text
    assert "repeat: differs" in text
    assert "accepted: needed" in "\n".join(also_found([{**one, "accept": None, "allowed": "needed"}], []))


def test_a_message_leaves_out_what_it_does_not_know() -> None:
    """Without case, cause, place and command there are two lines."""
    assert compose("test_norm", failed("vacuity", "proves nothing"), None).count("\n") == 1


def test_an_unexplained_failure_tells_what_was_ruled_out() -> None:
    """With a cause, what was ruled out on the way is left to the report."""
    ruled_out = ["layout: wrong on contiguous copies too"]
    verdict = failed("values", "off")
    assert "not layout: wrong" in compose("k", verdict, None, diagnosis=Diagnosis("unexplained", [], ruled_out))
    assert "layout" not in compose("k", verdict, None, diagnosis=Diagnosis("tail-mask", ["x"], ruled_out))
