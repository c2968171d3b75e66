"""What canaries leave behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pytest_fusion.canary.live import background


@pytest.fixture(scope="module", autouse=True)
def _nobody_is_looked_after_any_more() -> Iterator[None]:
    """A canary that outlives its tests keeps a thread at work, and later tests fork this process at any moment."""
    yield
    for one in list(background._tended):
        background.remove(one)
