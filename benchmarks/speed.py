"""How long the plugin takes: ``python -m benchmarks.speed startup|case|test|memory [--device cpu|cuda:0]``.

``startup``: what loading the plugin adds to pytest's own start. ``case``: one case through all checks, per shape.
``test``: a whole test cold and warm, and where its time goes. ``memory``: growth over 1,000 cases.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from pytest_fusion.run import device_choice

_SHAPES = ((16, 512), (256, 1024), (1024, 1024))


def startup() -> None:
    """Seconds of ``pytest --version`` with and without the plugin, best of ten, interleaved."""
    best = {"with": float("inf"), "without": float("inf")}
    for _ in range(10):
        for name, extra in (("with", []), ("without", ["-p", "no:fusion"])):
            begun = time.perf_counter()
            command = [sys.executable, "-m", "pytest", "--version", "--version", *extra]
            subprocess.run(command, check=True, capture_output=True)
            best[name] = min(best[name], time.perf_counter() - begun)
    added = 1e3 * (best["with"] - best["without"])
    print(f"pytest --version: {1e3 * best['without']:.0f} ms, with the plugin {added:+.0f} ms")


def case(device: str) -> None:
    """Milliseconds of one case through all checks, median of 20 after 5, in this process."""
    import torch

    from pytest_fusion.case.choosing import search
    from pytest_fusion.case.plan import Limits, build, make_plan
    from pytest_fusion.checks.case_judge import judge_case
    from pytest_fusion.checks.context import Context
    from reference_kernels.rms_norm.spec import SPEC as RMS_NORM
    from reference_kernels.softmax.spec import SPEC as SOFTMAX

    print(f"{'kernel':10} {'shape':>12} {'dtype':>9} {'ms a case':>10}  of which")
    for name, spec in (("rms_norm", RMS_NORM), ("softmax", SOFTMAX)):
        plan = make_plan(spec, limits=Limits(1 << 21, 1 << 25), pools=search.pools(spec, 0))
        for rows, columns in _SHAPES:
            for dtype in ("float32", "bfloat16"):
                choice: dict[str, object] = {"dtype": dtype}
                choice |= {f"dim {dim}": (rows,) for dim in spec.batch_names}
                choice |= {f"dim {dim}": columns for dim in spec.dim_order}
                context = Context(spec, torch.device(device), programs=1 << 30)
                spent = []
                for seed in range(25):
                    if seed == 5:
                        context.clock.seconds.clear()
                    one = build(plan, choice, seed)
                    begun = time.perf_counter()
                    result = judge_case(context, one)
                    spent.append(time.perf_counter() - begun)
                    assert result.failure is None, result.failure
                parts = ", ".join(f"{phase} {1e3 * s / 20:.1f}" for phase, s in context.clock.seconds.items())
                median_ms = 1e3 * statistics.median(spent[5:])
                print(f"{name:10} {f'{rows}x{columns}':>12} {dtype:>9} {median_ms:10.1f}  {parts}")


def test(device: str) -> None:
    """Seconds of 100 cases of rms_norm with a cold and a warm compile cache, of the full test, and their phases."""
    from pytest_fusion.plugin.testing import examine
    from reference_kernels.rms_norm.spec import SPEC

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for label, most in (("100 cases, cold", 100), ("100 cases, warm", 100), ("default profile, warm", None)):
            record = examine(SPEC, device=device, max_cases=most)
            total = sum(record.phases.values())
            own = (record.phases.get("plugin", 0.0) + record.seconds - total) / record.seconds
            parts = ", ".join(f"{phase} {s:.2f}" for phase, s in record.phases.items())
            print(f"{label:22} {record.verdict} {record.cases} cases {record.seconds:.2f} s; plugin {own:.0%}; {parts}")


def memory(device: str) -> None:
    """Resident memory of the process, and memory of the device, every 200 of 1,000 cases."""
    import torch

    from pytest_fusion.case.choosing import search
    from pytest_fusion.engine.campaign import Campaign
    from pytest_fusion.engine.profiles import PROFILES
    from pytest_fusion.engine.request import Request
    from reference_kernels.rms_norm.spec import SPEC

    def outer() -> None: ...

    def note(data: dict[str, object]) -> None:
        if int(str(data["cases"])) % 200 == 0:
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            on_device = torch.cuda.memory_allocated() / 2**20 if device != "cpu" else 0.0
            print(f"after {data['cases']:>5} cases: {resident:.0f} MiB resident, {on_device:.1f} MiB on the device")

    search.adopt(outer, outer)
    profile = PROFILES["deep" if device != "cpu" else "ci"]
    request = Request("memory", device, profile, seed=0, max_cases=1001)
    campaign = Campaign(SPEC, request, outer, {}, note)
    while campaign.judging.tally.cases < 1000:
        campaign.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("startup", "case", "test", "memory"))
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    if given.what == "startup":
        startup()
        return
    device = device_choice.choose(given.device)
    device_choice.prepare(device)
    todo: dict[str, Callable[[str], None]] = {"case": case, "test": test, "memory": memory}
    todo[given.what](device)


if __name__ == "__main__":
    main()
