"""A small serving loop with a canary in it: ``python -m examples.rollout.serve --folder FOLDER``.

The operator writes the state into FOLDER/states (``softmax: shadow``) and reads FOLDER/logs with ``pytest-fusion canary
status``. FOLDER/traffic, where it says ``large``, brings requests that no test of the candidate had.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pytest_fusion import canary
from pytest_fusion.canary import Canary, Policy, request
from pytest_fusion.run import device_choice

# One request in so many has large logits, once the traffic has any.
RARE = 10


def service(folder: Path, publishers: Sequence[Any] = (), **policy: Any) -> Canary:
    """The kernel as the server calls it: off until FOLDER/states says otherwise, logs and marks in FOLDER/logs."""
    from examples.rollout.kernels import SPEC, candidate, incumbent

    # Shares are large because an example has little traffic; the defaults are 1 %.
    shares = {"shadow": 0.5, "verify": 0.5, "interval_s": 0.5, **policy}
    return canary(
        "softmax",
        incumbent=incumbent,
        candidate=candidate,
        spec=SPEC,
        policy=Policy(state="off", file=folder / "states", directory=folder / "logs", writes=(), **shares),
        publishers=publishers,
    )


def requests(folder: Path, device: str, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Ids and logits, without end."""
    generator = torch.Generator().manual_seed(seed)
    traffic = folder / "traffic"
    for number in itertools.count(1):
        logits = torch.randn(1 + number % 4, 64, generator=generator)
        if number % RARE == 0 and traffic.exists() and "large" in traffic.read_text(encoding="utf-8"):
            logits *= 100
        yield f"request-{seed}-{number}", logits.to(device)


def serve(kernel: Canary, stream: Iterator[tuple[str, Tensor]], many: int) -> tuple[int, int]:
    """Answers ``many`` requests; how many, and how many answers were not finite."""
    wrong = 0
    for _ in range(many):
        key, logits = next(stream)
        with request(key):
            answer = kernel(logits, 0.5)
        wrong += int(not bool(torch.isfinite(answer).all()))
    return many, wrong


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.rollout.serve", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--port", type=int, help="where Prometheus finds the metrics (needs the extra 'metrics')")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    device = device_choice.choose("auto")
    device_choice.prepare(device)  # without a GPU the kernel is interpreted
    publishers: list[Any] = []
    if given.port is not None:
        from prometheus_client import start_http_server

        from pytest_fusion.canary.evidence.prometheus import Prometheus

        publishers.append(Prometheus())
        start_http_server(given.port, "127.0.0.1")
    kernel = service(given.folder, publishers)
    stream = requests(given.folder, device, given.seed)
    ends, total, wrong = time.monotonic() + given.seconds, 0, 0
    while time.monotonic() < ends and not (given.folder / "stop").exists():
        served, bad = serve(kernel, stream, 10)
        total, wrong = total + served, wrong + bad
    kernel.refresh()
    sys.stdout.write(json.dumps({"served": total, "wrong": wrong, **kernel.status()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
