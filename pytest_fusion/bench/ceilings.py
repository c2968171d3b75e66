"""What this GPU does at most, measured in the same run as what is held against it: a copy and a matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pytest_fusion.run.timing.replay import replayed

# 512 MiB in and out pass every last-level cache many times; a product of 8192 cubed fills every multiprocessor.
_COPIED = 1 << 29
_SIDE = 8192
_CALLS, _SAMPLES = 4, 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes per second that a copy reads and writes, and bfloat16 operations per second of a matrix product."""

    copy: float
    matmul: float

    def as_measures(self) -> dict[str, float]:
        return {"copy_bytes_per_s": self.copy, "matmul_flops_per_s": self.matmul}


def ceilings(device: torch.device) -> Ceilings | None:
    """Some 30 ms on an H200; ``None`` where the memory for it is not free."""
    try:
        source, target = torch.zeros(2, _COPIED, dtype=torch.uint8, device=device).unbind()
        copied = _best(lambda a, b: b.copy_(a), {"a": source, "b": target}, device)
        del source, target
        x = torch.zeros(_SIDE, _SIDE, dtype=torch.bfloat16, device=device).normal_()
        multiplied = _best(torch.mm, {"input": x, "mat2": x, "out": torch.empty_like(x)}, device)
    except torch.OutOfMemoryError:
        return None
    return Ceilings(2 * _COPIED / copied, 2 * _SIDE**3 / multiplied)


def _best(call: Any, arguments: dict[str, Any], device: torch.device) -> float:
    batch = replayed(call, [arguments] * _CALLS, device)
    return min(batch.seconds() for _ in range(_SAMPLES))
