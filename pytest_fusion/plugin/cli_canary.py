"""The commands ``pytest-fusion canary ...``: comparison of two kernels outside pytest, and state of rollouts."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fusion.canary.offline.incumbent.incumbents import parse
from pytest_fusion.engine.profiles import PROFILES, profile
from pytest_fusion.errors import CanaryError, FusionError
from pytest_fusion.report.canary_table import ORDER
from pytest_fusion.run import device_choice

if TYPE_CHECKING:
    from pytest_fusion.report.record import TestRecord

# By the verdict; 4 is also an error of use, as in all commands.
EXITS = {"promote": 0, "rollback": 1, "hold": 3, "error": 4, "nodata": 5}
STATUS = "exit status: " + ", ".join(f"{code} {name}" for name, code in EXITS.items()) + " or wrong use"


def add(commands: Any) -> None:
    """Adds ``canary`` and its commands to those of ``pytest-fusion``."""
    canary = commands.add_parser("canary", help="may a new kernel replace the one in production?")
    views = canary.add_subparsers(dest="view", required=True)
    compare = views.add_parser("compare", help="judge two kernels on the same cases, both beside the reference",
                               epilog=STATUS)  # fmt: skip
    compare.add_argument("--incumbent", required=True, help="git:REVISION, python:/path/to/python or module:function")
    compare.add_argument("--candidate", help="module:function (default: the fused call of the spec)")
    compare.add_argument(
        "--spec", required=True, metavar="MODULE:SPEC", help="a FusionSpec, or a test without fixtures"
    )
    compare.add_argument("--recording", type=Path, metavar="FILE", help="recorded traffic, compared too")
    compare.add_argument("--cases", type=int, metavar="N", help="at most so many cases")
    compare.add_argument("--without", default="", metavar="NAMES", help="what is left out: latency,memory")
    compare.add_argument("--device", default="auto", help="auto, cpu or cuda[:N]")
    compare.add_argument("--profile", default="dev", choices=tuple(PROFILES))
    compare.add_argument("--json", type=Path, metavar="FILE")
    compare.add_argument("--html", type=Path, metavar="FILE")
    status = views.add_parser(
        "status",
        help="where the rollouts stand whose logs are in a folder",
        epilog=f"{STATUS}; without --judge 0. Of several canaries, the first of: {', '.join(ORDER)}",
    )
    status.add_argument("folder", type=Path, help="that of Policy(directory=...), with the logs of all machines")
    status.add_argument("--judge", action="store_true", help="judge what was seen; see the exit status")
    status.add_argument("--json", action="store_true", help="as JSON, with all evidence")
    status.add_argument("--name", help="of this canary alone")
    status.add_argument("--rollout", help="this one (default: the one heard of last)")
    status.add_argument("--without", default="", metavar="METRICS", help="left out, as error_ratio,latency_ratio")


def run(given: argparse.Namespace) -> int:
    """Runs one of these commands; returns the exit status, 130 after Ctrl-C. Raises ``FusionError``."""
    try:
        return _status(given) if given.view == "status" else _compare(given)
    except KeyboardInterrupt:
        sys.stderr.write("pytest-fusion: interrupted\n")
        return 130


def _compare(given: argparse.Namespace) -> int:
    from pytest_fusion.canary.offline.comparison_verdict import check_without
    from pytest_fusion.report.report_paths import check_writable

    if given.cases is not None and given.cases < 1:
        raise CanaryError(f"--cases {given.cases}: expected 1 or more")
    without = check_without([name.strip() for name in given.without.split(",") if name.strip()])
    for option, path in (("--json", given.json), ("--html", given.html)):
        if path is not None:
            check_writable(path, option)
    record = _record(given, without)
    _show(record, given)
    return EXITS[str(record.canary["verdict"])]


def _record(given: argparse.Namespace, without: Sequence[str]) -> TestRecord:
    device = device_choice.choose(given.device)
    device_choice.prepare(device)  # before the modules of kernels are imported
    from pytest_fusion.canary.offline.comparison_mode import Compare
    from pytest_fusion.canary.offline.incumbent.incumbents import Incumbent, Setting
    from pytest_fusion.case.choosing import search as searching
    from pytest_fusion.engine.job import Job
    from pytest_fusion.engine.request import Request
    from pytest_fusion.spec.importable import named_spec

    here = Path.cwd()
    named = parse(given.incumbent, here)
    rival = Incumbent(named, Setting(here, here, device, spec=True), without=without, recording=given.recording)
    try:
        spec = named_spec(given.spec, folders=(str(here),))
        if given.candidate is not None:
            spec = spec.with_(fused=_candidate(given.candidate, here), name=spec.name)
        rival.find()
        # Under a budget of seconds a slow machine would promote after fewer cases than --cases says.
        counted = profile(given.profile).counted
        request = Request(nodeid=given.spec, device=device, profile=counted, max_cases=given.cases)
        return Compare(rival).run(Job(spec, request, searching.stand_in(), {}))
    finally:
        rival.end()


def _candidate(text: str, here: Path) -> Any:
    from pytest_fusion.spec.importable import named_kernel

    named = parse(text, here)
    if named.kind != "function":
        raise CanaryError(
            f"--candidate {text}: a candidate is a module:function that can be imported here; check the candidate out "
            "and name the other one by --incumbent"
        )
    return named_kernel(named.target, folders=(str(here),))


def _show(record: TestRecord, given: argparse.Namespace) -> None:
    from pytest_fusion.report.canary_table import canary_lines
    from pytest_fusion.report.environment import describe

    environment = describe(device_choice.choose(given.device), profile=given.profile)
    advice = "--fusion-canary-without"
    sys.stdout.write("".join(f"{text.replace(advice, '--without')}\n" for text, _ in canary_lines([record])))
    if record.verdict == "fail" and record.replay:
        sys.stdout.write(f"{_message(record)}\n")
    try:
        if given.json is not None:
            from pytest_fusion.report.json_file import write_json

            write_json(given.json, [record], environment)
        if given.html is not None:
            from pytest_fusion.report.html.page import write_page

            write_page(given.html.absolute(), [record], environment, title="pytest-fusion canary")
    except FusionError as error:
        sys.stderr.write(f"pytest-fusion: {error}\n")


def _message(record: TestRecord) -> str:
    """The finding; its replay file belongs to a spec, and a test of that spec runs it once it is pinned."""
    lines = record.message.split("\n")
    others = [line for line in lines if not line.startswith("  replay: ")]
    replay = f"  replay file: {record.replay} (its spec's test runs it from a folder fusion_replays)"
    return "\n".join([*others, replay])


def _status(given: argparse.Namespace) -> int:
    from pytest_fusion.canary.evidence.fleet import as_json, gather, lines, select, verdict
    from pytest_fusion.canary.evidence.promotion_rules import RULES, without

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
    return EXITS[min(decisions, key=ORDER.index)]
