"""The commands ``pytest-fusion canary ...``."""

from __future__ import annotations

import argparse
from typing import Any

from pytest_fusion import cli_status


def add(commands: Any) -> None:
    """Declare ``canary`` and its own commands among those of ``pytest-fusion``."""
    canary = commands.add_parser("canary", help="may a new kernel replace the one in production?")
    views = canary.add_subparsers(dest="view", required=True)
    cli_status.add(views)


def run(given: argparse.Namespace) -> int:
    """Run one of these commands; the exit status. Raises ``FusionError``."""
    return cli_status.run(given)
