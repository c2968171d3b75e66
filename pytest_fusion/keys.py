"""Where the plugin keeps its state on pytest's objects."""

from __future__ import annotations

import pytest

from pytest_fusion.options import Options
from pytest_fusion.report.record import TestRecord

options = pytest.StashKey[Options]()
device = pytest.StashKey[str]()
records = pytest.StashKey[list[TestRecord]]()
own_records = pytest.StashKey[list[TestRecord]]()
