"""The whole rollout in one go: ``python -m examples.rollout FOLDER`` writes a line of JSON for each step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from examples.rollout.serve import requests, serve, service
from pytest_fusion import canary
from pytest_fusion.run import device_choice

_HERE = "examples.rollout.kernels"
# Traffic has some 40 calls; what fuzzing adds makes this candidate's verdict.
_CASES = 80


def record(folder: Path, device: str, many: int = 40) -> int:
    """What a server calls its kernel with, recorded before there is any candidate; how many calls."""
    from examples.rollout.kernels import incumbent

    recorder = canary.record("softmax", incumbent, folder / "recordings")
    stream = requests(folder, device, seed=1)
    for _ in range(many):
        _, logits = next(stream)
        recorder(logits, 0.5)
    recorder.close()
    return many


def compare(folder: Path, cases: int) -> dict[str, Any]:
    """Both versions offline: on the recorded calls alone, or on fuzzed cases too. The verdict and the exit status."""
    report = folder / f"compare-{cases}.json"
    command = [sys.executable, "-m", "pytest_fusion.plugin.cli", "canary", "compare", "--spec", f"{_HERE}:SPEC"]
    command += ["--incumbent", f"{_HERE}:incumbent", "--candidate", f"{_HERE}:candidate"]
    # The candidate launches torch's kernels, which the CPU lane does not count; latency is for a GPU to tell; and what
    # the other one spills would have to be compiled first.
    command += ["--without", "latency,memory,launches,spills", "--recording", str(folder / "recordings")]
    command += ["--cases", str(cases), "--json", str(report)]
    status = subprocess.run(command, check=False, capture_output=True, text=True).returncode
    (test,) = json.loads(report.read_text(encoding="utf-8"))["tests"]
    return {"verdict": test["canary"]["verdict"], "exit": status, "reasons": test["canary"]["reasons"]}


def story(folder: Path) -> None:
    """Recorded, compared offline, then live: shadow, a share, the request that the candidate gets wrong, and back."""
    device = device_choice.choose("auto")
    device_choice.prepare(device)
    calls = record(folder, device)
    for step, cases in (("compared on the traffic", calls), ("compared on fuzzed cases too", _CASES)):
        sys.stdout.write(json.dumps({"step": step, "calls": calls, **compare(folder, cases)}) + "\n")
    # All calls are looked at, and nothing happens between two steps: what is told is the same each time.
    kernel = service(folder, shadow=1.0, verify=1.0, timed=0.0, interval_s=3600.0)
    stream = requests(folder, device)

    def tell(step: str, **facts: Any) -> None:
        status = kernel.status()
        told = {name: status[name] for name in ("state", "tripped", "counts")}
        sys.stdout.write(json.dumps({"step": step, **told, **facts}) + "\n")

    def serving(step: str, many: int = 60) -> None:
        _, wrong = serve(kernel, stream, many)
        kernel.refresh()
        tell(step, wrong=wrong)

    tell("off")
    for step, state in (("shadow", "shadow"), ("route", "route 0.5")):
        (folder / "states").write_text(f"softmax: {state}\n", encoding="utf-8")
        kernel.refresh()
        serving(step)
    (folder / "traffic").write_text("large\n", encoding="utf-8")
    serving("large requests arrive")
    serving("after the trip")
    kernel.close()
    kernel = service(folder)
    tell("a process that starts later")
    kernel.close()


if __name__ == "__main__":
    story(Path(sys.argv[1]))
