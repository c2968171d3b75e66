"""What each check costs: ``python -m benchmarks.checks [--device cpu|cuda:0] [--profile dev|ci|deep] [--cases N]``.

Row-wise kernels with ``grad=True`` and ``invariant="rows"`` through a whole test, in this process. ``values`` is what
every case costs first: one call, the reference with its lanes, their comparison; ``structure``, ``inputs`` and
``bounds`` come with it. ``unwritten`` is the second call, under the other fill, by which ``bounds`` and ``repeat`` are
judged too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from pytest_fusion.run import device_choice
from pytest_fusion.spec.fusion_spec import FusionSpec

_ALSO = {"values": "values (structure, inputs, bounds)", "unwritten": "unwritten (bounds, repeat)"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checks", description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--profile", default="dev")
    parser.add_argument("--cases", type=int)
    given = parser.parse_args()
    device = device_choice.choose(given.device)
    device_choice.prepare(device)
    import torch

    from benchmarks.checks.kernels import specs
    from pytest_fusion.case.choosing import search
    from pytest_fusion.engine.campaign import Campaign
    from pytest_fusion.engine.profiles import profile
    from pytest_fusion.engine.request import Request

    print(f"torch {torch.__version__}, device {device}, profile {given.profile}", flush=True)
    _whole(specs(), device, given.profile, given.cases)
    for name, spec in specs().items():

        def outer() -> None: ...

        search.adopt(outer, outer)
        request = Request(f"checks::{name}", device, profile(given.profile), seed=0, max_cases=given.cases)
        campaign = Campaign(spec, request, outer, {})
        begun = time.perf_counter()
        tally = campaign.run()
        seconds = time.perf_counter() - begun
        if tally.failure is not None:
            raise SystemExit(f"{name} failed, so its times mean nothing: {tally.failure.verdict.reason}")
        shares = campaign.judging.context.clock.checks
        calls = sum(share.calls for share in shares.values())
        print(f"\n{name}: {tally.cases} cases, {calls} calls, {seconds:.1f} s\n")
        print("| check | calls | s | share |")
        print("|---|---|---|---|")
        for check, share in sorted(shares.items(), key=lambda pair: -pair[1].seconds):
            label = _ALSO.get(check, check)
            print(f"| {label} | {share.calls} | {share.seconds:.2f} | {share.seconds / seconds:.0%} |")


def _whole(specs: Mapping[str, FusionSpec], device: str, profile: str, cases: int | None) -> None:
    """Each test as a user runs it, in a child and compiling ahead, twice: the second one finds compiled kernels."""
    from pytest_fusion.plugin.testing import examine

    for name, spec in specs.items():
        for when in ("first", "again"):
            with tempfile.TemporaryDirectory() as root:
                found = examine(spec, device=device, seed=0, profile=profile, max_cases=cases, root=Path(root))
            phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in found.phases.items())
            print(
                f"{name}, {when}: {found.verdict}, {found.cases} cases in {found.seconds:.1f} s ({phases})", flush=True
            )


if __name__ == "__main__":
    main()
