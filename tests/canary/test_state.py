"""Who may hold a canary back, and that nobody gets past who holds it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pytest_fusion import canary
from pytest_fusion.canary.live import state
from pytest_fusion.canary.live.policy import Mode, Policy
from pytest_fusion.canary.live.state import Control
from pytest_fusion.errors import CanaryError


class _Desk:
    """A control with its environment, its clock and what it reported."""

    def __init__(self, policy: Policy) -> None:
        self.environment: dict[str, str] = {}
        self.now = 0.0
        self.said: list[str] = []
        self.control = Control("rms_norm", policy, self.said.append, self.environment, lambda: self.now)

    def mode(self) -> str:
        self.control.look()
        return str(self.control.mode)


@pytest.mark.parametrize(
    ("text", "mode"),
    [("off", "off"), (" Shadow ", "shadow"), ("route", "route 0.2"), ("route:0.05", "route 0.05"), ("full", "full")],
)
def test_states_are_read(text: str, mode: str) -> None:
    """A state is a word, and for route perhaps a share."""
    assert str(Mode.parse(text, 0.2)) == mode


@pytest.mark.parametrize("text", ["offf", "", "route 2", "route -0.1", "route nan", "route x", "full 0.5"])
def test_wrong_states_are_named(text: str) -> None:
    """What is no state is refused with what is one."""
    with pytest.raises(CanaryError, match="canary state"):
        Mode.parse(text, 0.2)


@pytest.mark.parametrize("name", ["PYTEST_FUSION_CANARY", "PYTEST_FUSION_CANARY_RMS_NORM"])
def test_the_environment_holds_back(name: str) -> None:
    """The variable of all canaries and that of one count when they are set, and no longer once they are gone."""
    desk = _Desk(Policy(state="full"))
    assert desk.mode() == "full"
    desk.environment[name] = "off"
    assert desk.mode() == "off"
    del desk.environment[name]
    assert desk.mode() == "full"


def test_a_state_that_nobody_understands_means_off() -> None:
    """Somebody wanted something: what harms nobody is done, and said once."""
    desk = _Desk(Policy(state="full"))
    desk.environment["PYTEST_FUSION_CANARY"] = "of"
    assert [desk.mode(), desk.mode()] == ["off", "off"]
    assert len(desk.said) == 1
    assert "did you mean 'off'?" in desk.said[0]


def test_the_most_careful_of_those_who_speak_counts(tmp_path: Path) -> None:
    """File, environment and call together: the least reach, whoever asks for it."""
    file = tmp_path / "states"
    file.write_text("# ours\n*: full\nrms_norm: route 0.5\nother: off\n")
    desk = _Desk(Policy(state="shadow", file=file))
    assert desk.mode() == "route 0.5"
    desk.control.call("route 0.1")
    assert desk.mode() == "route 0.1"
    desk.environment["PYTEST_FUSION_CANARY"] = "route 0.3"
    assert desk.mode() == "route 0.1"
    file.write_text("*: off\n")
    assert desk.mode() == "off"
    file.write_text("")
    desk.control.call(None)
    assert desk.mode() == "route 0.3"


def test_a_file_that_is_not_there_yet_says_nothing(tmp_path: Path) -> None:
    """A switch that nobody has made holds nobody back; once made, it does."""
    desk = _Desk(Policy(state="shadow", file=tmp_path / "later"))
    assert desk.mode() == "shadow"
    (tmp_path / "later").write_text("rms_norm: off")
    assert desk.mode() == "off"


@pytest.mark.parametrize("damage", ["gone", "folder", "nonsense", "bytes"])
def test_a_file_that_is_lost_holds_as_it_was_and_then_means_off(tmp_path: Path, damage: str) -> None:
    """The last known state holds for ``stale_s``, then the incumbent alone, then what the mended file says."""
    file = tmp_path / "states"
    file.write_text("rms_norm: route 0.5")
    desk = _Desk(Policy(file=file, stale_s=600))
    assert desk.mode() == "route 0.5"
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage != "gone":
        file.write_bytes(b"\xff\xfe" if damage == "bytes" else b"rms_norm route")
    desk.now = 599
    assert desk.mode() == "route 0.5"
    desk.now = 601
    assert desk.mode() == "off"
    assert len(desk.said) == 2
    if damage == "folder":
        file.rmdir()
    file.write_text("rms_norm: full")
    assert desk.mode() == "full"


def test_a_file_that_does_not_answer_is_one_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hangs holds up neither calls nor the thread that looks after canaries; then it is off, like any."""
    monkeypatch.setattr(state, "_PATIENCE_S", 0.05)
    file = tmp_path / "states"
    file.write_text("rms_norm: route 0.5")
    desk = _Desk(Policy(file=file, stale_s=600))
    assert desk.mode() == "route 0.5"
    file.unlink()
    os.mkfifo(file)  # to open it for reading waits until somebody writes
    assert desk.mode() == "route 0.5"
    assert "it was not read in 0.05 s" in desk.said[0]
    desk.now = 601
    assert desk.mode() == "off"
    with file.open("w") as answer:
        answer.write("rms_norm: full")
    file.rename(tmp_path / "answered")
    file.write_text("rms_norm: full")
    while desk.mode() != "full":
        pass


def test_a_canary_whose_file_never_answers_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it, at the start either: calls have the incumbent, and a trip holds."""
    monkeypatch.setattr(state, "_PATIENCE_S", 0.05)
    file = tmp_path / "states"
    os.mkfifo(file)
    kernel = canary(
        "k",
        incumbent=lambda x: x * 2,
        candidate=lambda x: pytest.fail("called"),
        policy=Policy(state="full", file=file, interval_s=3600),
    )
    x = torch.ones(2)

    assert torch.equal(kernel(x), x * 2)
    assert kernel.state == "off"
    kernel.trip("enough")
    assert kernel.state == "tripped"
    kernel.close()
    os.close(os.open(file, os.O_RDWR))  # lets the thread go


def test_a_file_that_was_never_readable_means_off(tmp_path: Path) -> None:
    """Nobody knows what it would have said."""
    assert _Desk(Policy(state="full", file=tmp_path)).mode() == "off"


def test_a_trip_is_latched_and_known_to_the_next_process(tmp_path: Path) -> None:
    """It holds against every source and across a restart, for its rollout alone."""
    desk = _Desk(Policy(state="full", directory=tmp_path))
    assert desk.control.trip("three violations")
    assert not desk.control.trip("again")
    desk.control.leave_mark()
    desk.control.call("full")
    assert desk.mode() == "off"

    later = _Desk(Policy(state="full", directory=tmp_path))
    assert (later.mode(), later.control.tripped) == ("off", "three violations")
    later.control.rearm("2")
    assert later.mode() == "full"
    assert _Desk(Policy(state="full", directory=tmp_path, rollout="2")).mode() == "full"


def test_a_mark_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """The trip holds all the same."""
    (tmp_path / "file").write_text("")
    desk = _Desk(Policy(state="full", directory=tmp_path / "file"))
    desk.control.rearm("2")
    desk.control.trip("x")
    desk.control.leave_mark()
    assert desk.mode() == "off"
    assert "was not written" in desk.said[-1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": "on"},
        {"share": 1.5},
        {"shadow": float("nan")},
        {"verify": True},
        {"by": "call"},
        {"writes": "x"},
        {"timeout_s": 0},
        {"trip_after": 0},
        {"trip_after": 5, "trip_window": 4},
        {"tolerance": 1e-3},
    ],
    ids=str,
)
def test_a_policy_that_cannot_be_meant_is_refused(wrong: dict[str, object]) -> None:
    """Each value is named with what was expected."""
    with pytest.raises(CanaryError, match=f"{next(iter(wrong))}=|state 'on'"):
        Policy(**wrong)  # type: ignore[arg-type]
