"""The whole rollout in one go: ``python -m examples.rollout FOLDER`` writes a line of JSON for each step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from examples.rollout.serve import requests, serve, service
from pytest_fusion import lane


def story(folder: Path) -> None:
    """Off, shadow, a share, the request that the candidate gets wrong, and back."""
    device = lane.choose("auto")
    lane.prepare(device)
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
