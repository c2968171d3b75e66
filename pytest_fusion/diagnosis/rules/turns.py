"""The cause in a persistent loop: what is wrong once programs, one for each multiprocessor, have several tiles."""

from __future__ import annotations

from pytest_fusion.checks.multiprocessors import multiprocessors_of
from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.experiments import Lab


def later(lab: Lab) -> Found | None:
    """Wrong with the few multiprocessors that the case tells launchers of, right with those of an H100."""
    few = lab.base
    many = few.with_(multiprocessors=None)
    if few.multiprocessors is None or not (lab.ask(few).wrong and lab.ask(many).right):
        return None
    told = f"right where the launcher is told of {multiprocessors_of(many)} multiprocessors, wrong where of"
    return Found("later-turn", [f"{told} {few.multiprocessors}: a program has more than one tile then"])
