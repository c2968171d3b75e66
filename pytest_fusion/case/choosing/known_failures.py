"""Failing cases of earlier runs, kept in Hypothesis's example database beside its own."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing.search import user_settings, wants_phase
from pytest_fusion.case.misfit import misfit
from pytest_fusion.errors import ReplayError
from pytest_fusion.spec.fusion_spec import FusionSpec


class Known:
    """The failing cases of one test. Empty where the user's settings have no database or leave out the reuse phase."""

    def __init__(self, spec: FusionSpec, outer: Any, nodeid: str) -> None:
        self._spec = spec
        # A digest, because a file-based database names files by the key.
        self._key = hashlib.sha256(f"pytest-fusion {nodeid}".encode()).digest()
        self._database = user_settings(outer).database if wants_phase(outer, "reuse") else None
        self.cases: tuple[Case, ...] = tuple(self._fetch())

    def _fetch(self) -> list[Case]:
        """What fits the spec of today; the rest is dropped from the database."""
        found = []
        for data in sorted(self._database.fetch(self._key)) if self._database is not None else ():
            try:
                case = Case.from_json(json.loads(data))
            except (ReplayError, ValueError):
                case = None
            if case is not None and misfit(self._spec, case) is None:
                found.append(case)
            elif self._database is not None:
                self._database.delete(self._key, data)
        return found

    def update(self, failing: Case | None, *, all_ran: bool) -> None:
        """Keep ``failing``; forget the others when they ran and did not fail."""
        if self._database is None:
            return
        for case in self.cases if all_ran else ():
            if case != failing:
                self._database.delete(self._key, _bytes(case))
        if failing is not None:
            self._database.save(self._key, _bytes(failing))


def _bytes(case: Case) -> bytes:
    return json.dumps(case.as_json(), sort_keys=True).encode()
