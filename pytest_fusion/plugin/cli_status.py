"""The command ``pytest-fusion canary status``: where rollouts stand, and the judge's verdict on them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

# By the verdict; 4 is an error of use too, as everywhere.
EXITS = {"promote": 0, "rollback": 1, "hold": 3, "error": 4, "nodata": 5}
STATUS = "exit status: " + ", ".join(f"{code} {name}" for name, code in EXITS.items()) + " or wrong use"
# Where several canaries are judged, the one that needs somebody first.
_WORST = ("rollback", "error", "nodata", "hold", "promote")


def add(views: Any) -> None:
    """Declare ``status`` among the commands of ``canary``."""
    status = views.add_parser(
        "status",
        help="where the rollouts stand whose logs are in a folder",
        epilog=f"{STATUS}; without --judge 0. Of several canaries, the first of: {', '.join(_WORST)}",
    )
    status.add_argument("folder", type=Path, help="that of Policy(directory=...), with the logs of all machines")
    status.add_argument("--judge", action="store_true", help="judge what was seen; see the exit status")
    status.add_argument("--json", action="store_true", help="as JSON, with all evidence")
    status.add_argument("--name", help="of this canary alone")
    status.add_argument("--rollout", help="this one (default: the one heard of last)")
    status.add_argument("--without", default="", metavar="METRICS", help="left out, as error_ratio,latency_ratio")


def run(given: argparse.Namespace) -> int:
    """The exit status. Raises ``CanaryError``."""
    from pytest_fusion.canary.evidence.fleet import gather, select, verdict
    from pytest_fusion.canary.evidence.promotion_rules import RULES, without
    from pytest_fusion.canary.evidence.status import as_json, lines

    rules = without(RULES, [name.strip() for name in given.without.split(",") if name.strip()])
    rollouts, left = gather(given.folder)
    found = select(rollouts, given.name, given.rollout)
    judgements = {(one.name, one.rollout): verdict(one, rules) for one in found} if given.judge else {}
    if given.json:
        sys.stdout.write(json.dumps(as_json(found, judgements, left), indent=1) + "\n")
    else:
        for one in found:
            text = lines(one, judgements.get((one.name, one.rollout)), rules, time.time())
            sys.stdout.write("".join(f"{line}\n" for line in text))
        if not found:
            sys.stdout.write(f"no canary has written to {given.folder}\n")
        older = len(rollouts) - len(found)
        if older:
            sys.stdout.write(f"{older} other rollouts have logs here: --rollout, --name\n")
        sys.stdout.write("".join(f"left out: {text}\n" for text in left))
    if not given.judge:
        return 0
    decisions = {judgement.decision for judgement in judgements.values()} or {"nodata"}
    return EXITS[min(decisions, key=_WORST.index)]
